#!/usr/bin/env bash
# Installs DeepSpeed-Chat at a fixed commit, with the releases that were current when its code last
# changed (torch 2.1, DeepSpeed 0.12, Transformers 4.34). Needs Python 3.10, git and nvcc.
#     PYTHON=python3.10 bash benchmarks/paper/ppo/install.sh FOLDER
set -euo pipefail
folder=${1:?usage: install.sh FOLDER}
commit=2d1f3b38ca442fce0b2ff66ab413e96d02dad588
"${PYTHON:-python3.10}" -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --upgrade pip
"$folder/bin/python" -m pip install --quiet \
  torch==2.1.2 deepspeed==0.12.6 transformers==4.34.1 accelerate==0.24.1 datasets==2.14.7 \
  sentencepiece==0.1.99 protobuf==3.20.3 numpy==1.26.4 tensorboard==2.15.1 "setuptools<70" ninja
git init --quiet "$folder/source"
cd "$folder/source"
git remote add origin https://github.com/deepspeedai/DeepSpeedExamples.git
git fetch --quiet --depth 1 origin "$commit"
git checkout --quiet "$commit"
"$folder/bin/python" -m pip install --quiet --no-deps --editable applications/DeepSpeed-Chat
