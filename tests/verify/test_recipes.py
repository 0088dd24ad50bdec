"""Tests that run the commands of the recipes in docs/inference.md in order, as printed."""

from __future__ import annotations

import os
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.e2e.commands import LAUNCHER_VARIABLES, write_rows
from tests.sources import ROOT
from tests.tiny import HEADS, save_reward_model, save_tiny_model

pytestmark = pytest.mark.verify

PAGE = (ROOT / "docs/inference.md").read_text()
SECTION = PAGE.partition("## Three recipes")[2].partition("\n## ")[0]
RECIPES = re.findall(r"^([A-Z][^:\n]*):.*?\n\n```bash\n(.*?)```", SECTION, re.MULTILINE | re.DOTALL)
NAMES = [name.partition(":")[0] for name, _ in RECIPES]
# Flags for models of a few kilobytes, whose tokenizer has no tokens for < and _.
SMALL = {
    "generate": "--data.max_len 48 --rollout.max_new_tokens 8 --ds.param_dtype fp32",
    "rm": "--data.max_len 64 --ds.param_dtype fp32",
    "sft": "--data.max_len 64 --train.batch_size 4 --ds.param_dtype fp32",
    "dpo": "--data.max_len 64 --train.batch_size 4 --ds.param_dtype fp32",
}


def command_of(line: str) -> list[str]:
    """Return a command from the page with the flags for small models appended."""
    verb, *words = shlex.split(line.removeprefix("openrlhf "))
    kind = verb
    if verb == "batch_inference":
        kind = "rm" if "--task" in words else "generate"
    words += SMALL[kind].split()
    if "csft" in words:
        words += ["--reward_template", "{input} score:{reward} "]
    if "--csft.enable" in words:
        words += ["--csft.prompt", "score:5.00"]
    return [sys.executable, "-m", "openrlhf.cli.main", verb, *words]


def test_inference_page_has_three_recipes() -> None:
    assert [len(re.findall("^openrlhf ", block, re.MULTILINE)) for _, block in RECIPES] == [3, 3, 3]


@pytest.mark.parametrize(("name", "block"), RECIPES, ids=NAMES)
def test_commands_of_each_recipe_run_in_order(name: str, block: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "runs/sft/model", seed=0, **HEADS)
    torch.manual_seed(2)
    save_reward_model(tmp_path / "runs/rm/model", tmp_path / "runs/sft/model")
    draw = random.Random(0)
    asked = [{"input": f"{draw.randint(0, 9999)}="} for _ in range(8)]
    write_rows(tmp_path / "prompts.jsonl", asked)
    if (
        "--output_path answers.jsonl" not in block
    ):  # an earlier section of the page creates this file
        write_rows(
            tmp_path / "answers.jsonl",
            [{**row, "output": f"{draw.randint(0, 99)}<eos>"} for row in asked],
        )
    environment = {key: value for key, value in os.environ.items() if key not in LAUNCHER_VARIABLES}
    environment |= {"PYTHONPATH": str(ROOT), "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    for line in block.replace("\\\n", " ").strip().splitlines():
        done = subprocess.run(
            command_of(line),
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
