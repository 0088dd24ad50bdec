"""The example that creates a model and a tokenizer from a CSV file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.ranks import ROOT

FILE = (
    "prompt,chosen,rejected\nWhat is it?,A cat.,A dog.\n" + "Is it A or B?,It is A.,It is B.\n" * 20
)
SPACED = "User: {}\nAssistant: "


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the example on a CSV file, and return the model's folder."""
    folder = tmp_path_factory.mktemp("example")
    (folder / "pairs.csv").write_text(FILE)
    line = [sys.executable, "examples/data/tiny_model.py", folder / "pairs.csv", folder / "model"]
    subprocess.run(line, cwd=ROOT, check=True, capture_output=True)
    return folder / "model"


def test_model_created_from_csv_file_has_tokens_for_any_text(model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = "A cat.\n<|endoftext|> Übermut 漢字"
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(tokens) == text and tokens[-1] < len(tokenizer)
    assert tokens.count(tokenizer.eos_token_id) == 1
    hf = AutoModelForCausalLM.from_pretrained(model)
    assert (
        hf.config.vocab_size == len(tokenizer) and hf.config.eos_token_id == tokenizer.eos_token_id
    )


@pytest.mark.parametrize(
    ("verb", "flags", "said"),
    [
        ("chat", [], f"the template {SPACED[:-1]!r}."),
        (
            "batch_inference",
            [
                "--data.dataset",
                "pairs.csv",
                "--data.input_key",
                "prompt",
                "--output_path",
                "out.jsonl",
            ],
            f"Use --data.input_template ${SPACED[:-1]!r}",
        ),
    ],
)
def test_prompt_that_ends_with_the_space_before_answers_is_reported(
    model: Path, verb: str, flags: list[str], said: str
) -> None:
    line = [
        sys.executable,
        "-m",
        "openrlhf.cli.main",
        verb,
        "--model.model_name_or_path",
        str(model),
        "--dry_run",
    ]
    line += ["--data.input_template", SPACED, "--data.max_len", "64", *flags]
    done = subprocess.run(
        line,
        cwd=model.parent,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and said in done.stdout + done.stderr, done.stderr
