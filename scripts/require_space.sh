#!/usr/bin/env bash
# Ends with an error unless FOLDER's file system has GIB free: require_space.sh FOLDER GIB WHAT
set -euo pipefail

folder=$1 needed=$2 what=$3
free=$(($(df -Pk "$folder" | awk 'NR == 2 {print $4}') / 1024 / 1024))
if [ "$free" -lt "$needed" ]; then
  echo "$what needs $needed GiB of disk and $(df -P "$folder" | awk 'NR == 2 {print $6}') has $free GiB free; make room (for example 'uv cache prune'), or clone onto a larger disk" >&2
  exit 1
fi
