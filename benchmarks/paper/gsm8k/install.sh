#!/usr/bin/env bash
# Installs TRL 1.16.0 with vLLM 0.24.0 (TRL supports 0.22 to 0.31) into a virtual environment.
#     bash benchmarks/paper/gsm8k/install.sh FOLDER
set -euo pipefail
folder=${1:?usage: install.sh FOLDER}
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --upgrade pip
"$folder/bin/python" -m pip install --quiet \
  trl==1.16.0 accelerate==1.15.0 deepspeed==0.19.8 vllm==0.24.0 transformers==5.17.0 datasets==5.2.0
