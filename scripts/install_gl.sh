#!/usr/bin/env bash
# Installs the libraries that MuJoCo needs to render without a screen, if they are missing and this user may.
set -euo pipefail

packages="libegl1 libgl1 libgl1-mesa-dri libosmesa6"
# The Mesa driver is looked for too: libEGL without a driver creates no context.
if ldconfig -p | grep -q libEGL.so.1 && { ldconfig -p | grep -q libEGL_mesa || ldconfig -p | grep -q libEGL_nvidia; }; then
  exit 0
fi
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
  echo "MuJoCo needs GL libraries to render. Install them once, then run make again:"
  echo "  sudo apt-get update && sudo apt-get install -y $packages"
  exit 1
fi
apt-get update -qq
# libosmesa6 left Debian 13; EGL alone is enough there.
apt-get install -y -qq $packages || apt-get install -y -qq libegl1 libgl1 libgl1-mesa-dri
