#!/usr/bin/env bash
# Installs verl 0.9.1 with the vLLM, torch and FlashAttention that its package pins.
#     bash benchmarks/paper/dapo/install.sh FOLDER
set -euo pipefail
folder=${1:?usage: install.sh FOLDER}
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --upgrade pip
"$folder/bin/python" -m pip install --quiet 'verl[vllm]==0.9.1'
"$folder/bin/python" -m pip install --quiet --no-build-isolation 'verl[flash-attn-cu130torch211]==0.9.1'
