"""Offline training on all rows of HH-RLHF and GSM8K.

SFT, DPO and KTO train on HH-RLHF; PRM trains on every graded step of GSM8K's solutions. Loss flags
keep their defaults.
"""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.data.test_real_rows import steps_example
from tests.e2e.commands import column, numbers, places, run, write_rows
from tests.verify.results import write_result
from tests.verify.test_hh_rlhf import LONGEST, make_model

pytestmark = pytest.mark.verify
BATCH = 64
STEP = "<|step|>"
CONVERSATIONS = {
    "data.input_key": "chosen",
    "data.multiturn": True,
    "data.apply_chat_template": True,
}
CHAT = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}<eos>{% endif %}\n"
    "{% endfor %}"
)
STEPS = {
    "data.input_key": "text",
    "data.label_key": "labels",
    "prm.placeholder_token": STEP,
    "prm.reward_tokens": ["+", "-"],
}
COLUMNS = [
    "command",
    "rows",
    "steps",
    "loss of the first and last five steps",
    "on the first 200 rows, after step 5 and at the end",
    "seconds",
]


@pytest.mark.timeout(3600)
def test_every_row_is_trained_on_by_every_offline_trainer(data_dir: Path, tmp_path: Path) -> None:
    with gzip.open(data_dir / "hh-rlhf" / "harmless-base-test.jsonl.gz", "rt") as lines:
        pairs = [json.loads(line) for line in lines]
    graded = (data_dir / "gsm8k" / "example_model_solutions.jsonl").read_text().splitlines()
    solutions = list(steps_example().rows(graded, STEP))
    texts = [pair["chosen"] for pair in pairs] + [row["text"] for row in solutions]
    model = make_model(tmp_path / "model", texts, marks=[STEP])
    table: list[list[Any]] = []
    for command, rows, loss, of_first, flags in (
        (
            "train_sft",
            pairs,
            "train/gpt_loss",
            "eval/eval gpt_loss",
            CONVERSATIONS | {"data.tokenizer_chat_template": CHAT},
        ),
        ("train_dpo", pairs, "train/loss", "eval/eval_loss", {"ref.precompute": True}),
        ("train_kto", pairs, "train/kto_loss", "eval/eval_loss", {}),
        ("train_prm", solutions, "train/prm_loss", "eval/eval prm_loss", STEPS),
    ):
        trained, first_rows = (
            write_rows(tmp_path / "rows.jsonl", rows),
            write_rows(tmp_path / "first.jsonl", rows[:200]),
        )
        folder, start = tmp_path / command, time.monotonic()
        done = run(
            command,
            {
                "model.model_name_or_path": model,
                "data.dataset": trained,
                "data.max_len": LONGEST,
                "eval.dataset": first_rows,
                "eval.split": "train",
                "eval.steps": 5,
                "train.batch_size": BATCH,
                "train.micro_batch_size": 8,
                "train.max_epochs": 1,
                "adam.lr": 1e-3,
                "ds.param_dtype": "fp32",
                "ds.packing_samples": True,
                **flags,
                **places(folder),
            },
            timeout=1800,
        )
        kept = next(
            line for line in done.printed.splitlines() + done.errors.splitlines() if " kept" in line
        )
        losses, seen = column(folder, loss), column(folder, of_first)
        first, last = (sum(part) / 5 for part in (losses[:5], losses[-5:]))
        assert seen[-1] < seen[0] and len(numbers(folder)) >= len(losses) >= len(rows) // BATCH // 2
        shown = f"{seen[0]:.3f} → {seen[-1]:.3f}"
        table.append(
            [
                command,
                kept,
                len(losses),
                f"{first:.3f} → {last:.3f}",
                shown,
                f"{time.monotonic() - start:.0f}",
            ]
        )
    note = (
        "A random model with 0.3 million parameters, one process, packed, full-length texts. "
        "A model this small cannot learn more than the form of the texts."
    )
    write_result(
        "offline_passes",
        "Every row of HH-RLHF and GSM8K through the offline trainers",
        "make verify",
        COLUMNS,
        table,
        note,
    )
