"""HH-RLHF and GSM8K rows are read correctly for every kind of training.

`make test` uses some of the rows, and `make verify` uses all of them.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from openrlhf.config.flags import amend
from openrlhf.config.learning import RLDataConfig
from openrlhf.config.supervised import DPOConfig, KTOConfig, PRMConfig, RMConfig, SFTConfig
from openrlhf.data.feedback import BothAnswers, LabelledDataset, PreferenceDataset
from openrlhf.data.layouts import recognise
from openrlhf.data.loading import load_datasets
from openrlhf.data.prompts import PromptDataset
from openrlhf.data.sft import SFTDataset
from openrlhf.data.steps import StepDataset
from tests.data.small import PLAIN_CHAT, build_tokenizer
from tests.sources import ROOT

SLICE, ALL = 60, 10**6
TOKENIZER = build_tokenizer(PLAIN_CHAT, eos="<|end|>")
MAX_LEN = 1 << 16  # long enough that nothing is truncated
AMOUNTS = pytest.mark.parametrize("count", [SLICE, pytest.param(ALL, marks=pytest.mark.verify)])


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file's rows, both as loaded by the package and as parsed by `json`."""

    rows: Dataset
    lines: list[dict[str, Any]]


@pytest.fixture
def read(data_dir: Path) -> Callable[..., Source]:
    """Read up to `count` rows from a test data file."""

    def rows(file: str, count: int) -> Source:
        path = data_dir / file
        text = (
            gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        ).decode()
        lines = [json.loads(line) for line in text.removesuffix("\n").split("\n")[:count]]
        return Source(
            rows=load_datasets(str(path), split="train", max_samples=count, seed=0), lines=lines
        )

    return rows


def seen(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def spelled(tokens: list[int]) -> str:
    return "".join(TOKENIZER.convert_ids_to_tokens(tokens))


def section(root: Any, rows: Dataset, **given: Any) -> Any:
    """Return the data section that a command would use after layout detection."""
    paths = {f"data.{flag}": value for flag, value in given.items()}
    return recognise(rows, amend(root(), {"data.max_len": MAX_LEN, "given": paths, **paths}))


def last_answer(text: str) -> str:
    return text.rpartition("\n\nAssistant:")[2].rstrip("\n")


HH = "hh-rlhf/harmless-base-test.jsonl.gz"


def unequal(source: Source) -> list[dict[str, Any]]:
    return [
        line
        for line in source.lines
        if line["chosen"].rstrip("\n") != line["rejected"].rstrip("\n")
    ]


@AMOUNTS
def test_hh_rlhf_is_read_as_reward_model_and_dpo_pairs(
    count: int, read: Callable[..., Source]
) -> None:
    source = read(HH, count)
    lines = unequal(source)
    whole = PreferenceDataset(source.rows, TOKENIZER, section(RMConfig, source.rows))
    pairs = PreferenceDataset(
        source.rows, TOKENIZER, section(DPOConfig, source.rows), needs_prompt=True
    )
    assert len(whole) == len(pairs) == len(lines)
    assert whole.summary.startswith(f"{len(lines)} of {len(source.lines)} pairs kept")
    for number, line in enumerate(lines):
        row = pairs[number]
        assert row.chosen[:-2] == whole[number].chosen[:-2] == seen(line["chosen"].rstrip("\n"))
        for tokens, text in ((row.chosen, line["chosen"]), (row.rejected, line["rejected"])):
            ends_alike = tokens[: row.prompt_length] == seen(text)[: row.prompt_length]
            assert ends_alike and row.prompt_length <= len(seen(text.rstrip("\n"))) - len(
                seen(last_answer(text))
            )


@AMOUNTS
def test_hh_rlhf_is_read_as_labelled_answers(count: int, read: Callable[..., Source]) -> None:
    source = read(HH, count)
    pairs = PreferenceDataset(
        source.rows, TOKENIZER, section(KTOConfig, source.rows), needs_prompt=True
    )
    both = BothAnswers(pairs)
    assert len(both) == 2 * len(unequal(source))
    assert sum(both[number].desirable for number in range(len(both))) == len(pairs)
    with_prompts = sum(both[number].prompt_length > 1 for number in range(len(both)))
    assert with_prompts == len(both)


@AMOUNTS
def test_hh_rlhf_is_read_as_conversations(count: int, read: Callable[..., Source]) -> None:
    source = read(HH, count)
    flags = {"input_key": "chosen", "apply_chat_template": True, "multiturn": True}
    rows = SFTDataset(source.rows, TOKENIZER, section(SFTConfig, source.rows, **flags))
    kept = [line["chosen"] for line in source.lines if last_answer(line["chosen"]).strip()]
    assert len(rows) == len(kept)
    for number, text in enumerate(kept):
        learned = [
            t for t, on in zip(rows[number].tokens, rows[number].loss_mask, strict=True) if on
        ]
        turns = [
            part.partition("\n\nHuman:")[0].strip() for part in text.split("\n\nAssistant:")[1:]
        ]
        assert spelled(learned) == spelled(seen("<|end|>\n".join(turns) + "<|end|>"))


@AMOUNTS
def test_prompts_and_answers_of_gsm8k_are_detected(count: int, read: Callable[..., Source]) -> None:
    source = read("gsm8k/train.jsonl", count)
    rows = SFTDataset(source.rows, TOKENIZER, section(SFTConfig, source.rows))
    prompts = PromptDataset(
        source.rows,
        TOKENIZER,
        section(lambda: amend(SFTConfig(), {"data": RLDataConfig()}), source.rows),
    )
    assert len(rows) == len(prompts) == len(source.lines)
    for number, line in enumerate(source.lines):
        assert prompts[number].tokens == seen(line["question"])
        assert rows[number].tokens == seen(
            f"User: {line['question']}\nAssistant: {line['answer']} <|end|>"
        )


def steps_example() -> Any:
    spec = importlib.util.spec_from_file_location(
        "gsm8k_steps", ROOT / "examples/data/gsm8k_steps.py"
    )
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@AMOUNTS
def test_gsm8k_solution_steps_are_read_as_process_reward_model_rows(
    count: int, data_dir: Path
) -> None:
    lines = (data_dir / "gsm8k/example_model_solutions.jsonl").read_text().splitlines()[:count]
    made = list(steps_example().rows(lines, "<think>"))
    assert len(made) == 4 * len(lines)
    flags = {
        "data.max_len": MAX_LEN,
        "data.input_key": "text",
        "data.label_key": "labels",
        "prm.placeholder_token": "<think>",
    }
    rows = StepDataset(Dataset.from_list(made), TOKENIZER, amend(PRMConfig(), flags))
    labelled = [row for row in made if any(row["labels"])]
    assert rows.summary.startswith(f"{len(labelled)} of {len(made)} rows kept")
    counts = Counter(each for row in labelled for each in row["labels"] if each)
    assert (
        rows.summary.endswith(f" Labels: {counts['+']} +, {counts['-']} -.")
        and counts["+"] > counts["-"] > 0
    )
    for number, row in enumerate(labelled):
        assert [chr(int(label) - 9 + 32) for label in rows[number].labels] == [
            each for each in row["labels"] if each
        ]
        assert {rows[number].tokens[place] for place in rows[number].places} == {6}


@pytest.mark.parametrize(
    ("step", "label"),
    [
        ("16 - 3 = <<16-3=13>>13", "+"),
        ("<<10/3=3.33>>3.33", "+"),
        ("<<10/3=3.34>>3.34", "-"),
        ("<<1,000*5%=50>>50", "+"),
        ("<<2+2=4>> and <<2*3=5>>", "-"),
        ("<<x+1=2>>", None),
        ("<<1/0=2>>", None),
        ("So it is 4.", None),
    ],
)
def test_step_is_labelled_correct_if_its_calculations_are_correct(
    step: str, label: str | None
) -> None:
    assert steps_example().label(step) == label


def wrong_rows() -> list[Any]:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    return [
        pytest.param("sft", {"input": value, "output": "b"}, "column 'input': is",
                     id=f"a prompt that is {value!r}")
        for value in (None, 3, [], {"a": 1})
    ] + [
        pytest.param("chat", {"input": value}, "column 'input': ", id=f"a chat that is {value!r}")
        for value in (None, 3, [], [3], [{"role": "boss", "content": "a"}],
                      [{"role": "user", "content": 3}], [*chat, None])
    ] + [
        pytest.param("dpo", {"prompt": "a", "chosen": value, "rejected": "c"},
                     "column 'chosen': is", id=f"an answer that is {value!r}")
        for value in (None, 3, [])
    ] + [
        pytest.param("kto", {"input": "a", "output": "b", "label": value}, "column 'label': is",
                     id=f"a label that is {value!r}")
        for value in (None, 2, "good", [], 0.5)
    ] + [
        pytest.param("prm", {"input": "a<think>", "label": value}, "column 'label': ",
                     id=f"labels that are {value!r}")
        for value in (None, 1, "+", [], ["+", "-"], ["yes"], [3])
    ]  # fmt: skip


@pytest.mark.parametrize(("kind", "row", "complaint"), wrong_rows())
def test_error_for_an_unreadable_row_names_its_column(
    kind: str, row: Any, complaint: str, tmp_path: Path
) -> None:
    good = {
        "sft": {"input": "a", "output": "b"},
        "chat": {
            "input": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        },
        "dpo": {"prompt": "a", "chosen": "b", "rejected": "c"},
        "kto": {"input": "a", "output": "b", "label": 1},
        "prm": {"input": "a<think>", "label": ["+"]},
    }[kind]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in (good, row)))
    rows = load_datasets(str(path), split="train", max_samples=10, seed=0)
    with pytest.raises(ValueError, match=rf"rows\.jsonl, row 2, {complaint}"):
        tokenized(kind, rows, TOKENIZER)


def tokenized(kind: str, rows: Dataset, tokenizer: PreTrainedTokenizerBase) -> Any:
    match kind:
        case "sft":
            return SFTDataset(rows, tokenizer, section(SFTConfig, rows, output_key="output"))
        case "chat":
            return SFTDataset(rows, tokenizer, section(SFTConfig, rows, apply_chat_template=True))
        case "dpo":
            return PreferenceDataset(rows, tokenizer, section(DPOConfig, rows), needs_prompt=True)
        case "kto":
            return LabelledDataset(rows, tokenizer, section(KTOConfig, rows))
        case _:
            return StepDataset(
                rows, tokenizer, amend(PRMConfig(), {"prm.placeholder_token": "<think>"})
            )
