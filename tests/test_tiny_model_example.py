"""The example that makes a model and a tokenizer from a csv file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.ranks import ROOT

FILE = "prompt,chosen,rejected\nWhat is it?,A cat.,A dog.\n"


def test_the_model_of_a_csv_file_has_tokens_for_every_text(tmp_path: Path) -> None:
    (tmp_path / "pairs.csv").write_text(FILE)
    line = [sys.executable, "examples/data/tiny_model.py", tmp_path / "pairs.csv", tmp_path / "model"]
    subprocess.run(line, cwd=ROOT, check=True, capture_output=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    text = "A cat.\n<|endoftext|> Übermut 漢字"
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(tokens) == text and tokens[-1] < len(tokenizer)
    assert tokens.count(tokenizer.eos_token_id) == 1
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.config.vocab_size == len(tokenizer) and model.config.eos_token_id == tokenizer.eos_token_id
