#!/usr/bin/env bash
# Installs the browser that drives the tests of the collection page, if it is missing and this user may.
set -euo pipefail

for name in chromium chromium-browser google-chrome; do
  if command -v "$name" >/dev/null; then exit 0; fi
done
if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null && apt-get update -qq && apt-get install -y -qq chromium; then
  exit 0
fi
# Nothing else needs a browser, so it is no reason to run no test; where CI is set the page's tests fail without it.
echo "The tests of the collection page need Chromium and are skipped without it. To run them: sudo apt-get install -y chromium"
