"""End-to-end tests of users' offline tasks, in one process and under both launchers.

One task is the example in docs/extending.md, and another is written from scratch.
"""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from openrlhf.training.devices import free_port
from tests.e2e.commands import column, places, run, write_rows
from tests.sources import ROOT
from tests.tiny import save_tiny_model

ROWS, TEMPLATE = 16, "reverse {}="


@pytest.fixture(scope="module")
def workspace(own_folder: Path) -> Path:
    """Create the model, the dataset, and the example file from the documentation."""
    save_tiny_model(own_folder / "model")
    draw = random.Random(1)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(1, 12))) for _ in range(ROWS)]
    write_rows(
        own_folder / "words.jsonl",
        [
            {"input": word, "output": word[::-1] + "<eos>", "label": int(word[-1] < "e")}
            for word in words
        ],
    )
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/extending.md").read_text(), re.DOTALL)
    (code,) = [block for block in blocks if "offline_task" in block]
    (own_folder / "focal.py").write_text(code)
    return own_folder


def flags(workspace: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    """Return flags that make every optimizer step use all rows."""
    return {
        "plugin": workspace / "focal.py",
        "model.model_name_or_path": workspace / "model",
        "data.dataset": workspace / "words.jsonl",
        "data.output_key": "output",
        "data.input_template": TEMPLATE,
        "train.batch_size": ROWS,
        "train.micro_batch_size": 4,
        "train.max_epochs": 3,
        "adam.lr": 1e-2,
        "ds.param_dtype": "fp32",
        **places(folder),
        **changes,
    }


@pytest.fixture(scope="module")
def alone(workspace: Path) -> Path:
    """Run the documented task as a single process."""
    folder = workspace / "alone"
    run("main focal_sft", flags(workspace, folder))
    return folder


def answer_logprobs(workspace: Path) -> list[float]:
    """Return log π of each target token before training, from plain Transformers in float64."""
    tokenizer = AutoTokenizer.from_pretrained(workspace / "model")
    hf = AutoModelForCausalLM.from_pretrained(workspace / "model", dtype=torch.float64)
    found: list[float] = []
    for line in (workspace / "words.jsonl").read_text().splitlines():
        row = json.loads(line)
        prompt, answer = (
            tokenizer(text).input_ids for text in (TEMPLATE.format(row["input"]), row["output"])
        )
        with torch.no_grad():
            logprobs = torch.log_softmax(
                hf(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1], -1
            )
        found += [float(logprobs[place, token]) for place, token in enumerate(answer)]
    return found


def test_loss_of_a_plugin_task_matches_its_formula(alone: Path, workspace: Path) -> None:
    losses = [-((1 - math.exp(log_p)) ** 2) * log_p for log_p in answer_logprobs(workspace)]
    assert column(alone, "train/gpt_loss")[0] == pytest.approx(sum(losses) / len(losses), abs=1e-5)
    assert column(alone, "train/gpt_loss")[-1] < column(alone, "train/gpt_loss")[0]


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(
            ("deepspeed", "--num_gpus", "2", "--module"), id="deepspeed", marks=pytest.mark.verify
        ),
        pytest.param(("torchrun", "--nproc_per_node", "2", "-m"), id="torchrun"),
    ],
)
def test_two_processes_give_the_same_result_as_one(
    alone: Path, workspace: Path, launcher: tuple[str, ...]
) -> None:
    folder = workspace / launcher[0]
    run(
        "main focal_sft",
        flags(workspace, folder),
        launcher=(launcher[0], "--master_port", str(free_port()), *launcher[1:]),
    )
    assert column(folder, "train/gpt_loss") == pytest.approx(
        column(alone, "train/gpt_loss"), abs=1e-4
    )


def test_config_file_of_a_run_is_sufficient_to_repeat_the_run(alone: Path, workspace: Path) -> None:
    """The saved configuration names the plug-in that provides the command."""
    done = run("main focal_sft", {"config": alone / "config.yaml", "dry_run": True})
    assert "16 of 16 rows kept" in done.printed


def test_task_with_custom_rows_and_a_custom_model_trains(workspace: Path) -> None:
    folder = workspace / "classifier"
    changes = {
        "plugin": ROOT / "tests/e2e/plugin_files/classifier.py",
        "data.output_key": "label",
        "eval.dataset": workspace / "words.jsonl",
        "eval.steps": 10,
        "train.max_epochs": 30,
    }
    done = run("main classifier", flags(workspace, folder, **changes))
    assert "16 texts. 30 optimizer step(s) of 16 rows" in done.printed
    assert len(column(folder, "eval/acc")) == 3
    assert column(folder, "eval/acc")[-1] == 1.0
    assert (
        AutoModelForSequenceClassification.from_pretrained(folder / "model").config.num_labels == 1
    )


PLUGIN = ROOT / "tests/e2e/plugin_files/distillation.py"


@pytest.mark.verify
@pytest.mark.parametrize("task", ["stay_close", "above_average"])
def test_frozen_model_and_window_mean_do_not_depend_on_how_batches_are_split(
    workspace: Path, task: str
) -> None:
    """The single process does not split batches.

    The two processes hold shards of both models and split their rows into three micro-batches.
    """
    whole, split = workspace / f"{task}-whole", workspace / f"{task}-split"
    changes = {"plugin": PLUGIN, "eval.dataset": workspace / "words.jsonl", "adam.lr": 2e-3}
    run(f"main {task}", flags(workspace, whole, **changes, **{"train.micro_batch_size": 16}))
    two = ("torchrun", "--nproc_per_node", "2", "--master_port", str(free_port()), "-m")
    parts = {"train.micro_batch_size": 1, "ds.zero_stage": 3, "ds.packing_samples": True}
    run(f"main {task}", flags(workspace, split, **changes, **parts), launcher=two)
    for name in ("train/gpt_loss", "train/grad_norm"):
        assert column(split, name) == pytest.approx(column(whole, name), rel=2e-4), name
    if task == "stay_close":
        apart = column(whole, "train/apart")
        assert (
            apart[0] == pytest.approx(0, abs=1e-6) and apart[2] > 1e-3
        )  # the frozen model is not exported


def test_window_mean_matches_its_formula(workspace: Path) -> None:
    """The expected value for the first step comes from plain Transformers in float64."""
    folder = workspace / "formula"
    run("main above_average", flags(workspace, folder, plugin=PLUGIN, **{"train.max_epochs": 1}))
    logprobs = torch.tensor(answer_logprobs(workspace), dtype=torch.float64)
    expected = -(torch.sigmoid(logprobs - logprobs.mean()) * logprobs).mean()
    assert column(folder, "train/gpt_loss")[0] == pytest.approx(float(expected), abs=1e-5)


def test_flags_of_a_plugin_task_are_checked_like_the_flags_of_sft(workspace: Path) -> None:
    wrong = flags(workspace, workspace / "wrong", **{"data.output_key": None, "data.datset": "d"})
    done = run("main focal_sft", wrong, status=2)
    assert "focal_sft has no flag --data.datset. Did you mean --data.dataset?" in done.errors
    assert "Traceback" not in done.errors
