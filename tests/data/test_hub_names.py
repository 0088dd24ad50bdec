"""Datasets with Hub names are loaded from the Hub.

Here the Hub is a local fake, used by a separate process through HF_ENDPOINT.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.data.hub_double import hub
from tests.data.small import json_lines

CONFIGS = b"""---
configs:
- config_name: easy
  data_files: [{split: train, path: easy/train.jsonl}]
- config_name: hard
  data_files: [{split: train, path: hard/train.jsonl}, {split: test, path: hard/test.jsonl}]
---
"""
PROGRAM = """
import json, sys
from openrlhf.data.loading import DataError, load_datasets
for spec, split in json.loads(sys.argv[1]):
    try:
        print(json.dumps(list(load_datasets(spec, split=split, max_samples=9, seed=0)["input"])))
    except DataError as error:
        print(json.dumps(str(error)))
"""


def ask(
    files: dict[str, bytes], questions: list[tuple[str, str]], home: Path
) -> list[list[str] | str]:
    """Return the result of `load_datasets` for each (spec, split).

    The fake Hub contains the dataset `me/tiny` with the given files.
    """
    with hub("me/tiny", files) as address:
        environment = os.environ | {"HF_ENDPOINT": address, "HF_HOME": str(home)}
        environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, json.dumps(questions)],
            env=environment,
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def lines(*names: str) -> bytes:
    return json_lines([{"input": name} for name in names]).encode()


def test_hub_dataset_is_loaded_by_split_and_errors_name_the_dataset_and_the_split(
    tmp_path: Path,
) -> None:
    files = {"train.jsonl": lines("a", "b"), "test.jsonl": lines("c")}
    questions = [
        ("me/tiny", "train"),
        ("me/tiny", "test"),
        ("me/tiny", "dev"),
        ("me/other", "train"),
    ]
    train, test, no_split, no_dataset = ask(files, questions, tmp_path)
    assert (train, test) == (["a", "b"], ["c"])
    assert "me/tiny has no split 'dev'; it has 'train', 'test'" in no_split
    assert "me/other could not be loaded from the hub" in no_dataset


def test_folder_of_a_hub_dataset_is_selected_with_an_at_sign(tmp_path: Path) -> None:
    files = {
        "README.md": CONFIGS,
        "easy/train.jsonl": lines("a"),
        "hard/train.jsonl": lines("b", "c"),
        "hard/test.jsonl": lines("d"),
    }
    questions = [("me/tiny@hard", "train"), ("me/tiny@hard", "test"), ("me/tiny", "train")]
    train, test, unnamed = ask(files, questions, tmp_path)
    assert (train, test) == (["b", "c"], ["d"])
    assert "available configs: ['easy', 'hard']" in unnamed
    assert "owner/name@folder" in unnamed
