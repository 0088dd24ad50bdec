"""Control tokens inside dataset text are reported for every kind of row.

Rows that are expected to have control tokens are not reported.
"""

from __future__ import annotations

from typing import Any

import pytest
from datasets import Dataset

from openrlhf.config.inference import InferenceDataConfig
from openrlhf.config.learning import RLDataConfig
from openrlhf.config.supervised import (
    KTODataConfig,
    PreferenceDataConfig,
    PRMConfig,
    PRMDataConfig,
    PRMLossConfig,
    SFTDataConfig,
)
from openrlhf.data.feedback import LabelledDataset, PreferenceDataset
from openrlhf.data.prompts import AnsweredDataset, PromptDataset
from openrlhf.data.sft import SFTDataset
from openrlhf.data.steps import StepDataset
from tests.data.small import PLAIN_CHAT, build_tokenizer

CHAT = {"apply_chat_template": True}
PLAIN = {"input_template": "Q: {} A: "}
WHOLE = "<|user|>a<|end|>\n<|assistant|>"


def asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}, {"role": "assistant", "content": "ok"}]


def messages(text: str) -> dict[str, Any]:
    return {"input": asked(text)}


def answers(text: str) -> dict[str, Any]:
    return {"input": text, "output": "ok", "label": 1}


def pairs(text: str) -> dict[str, Any]:
    return {"prompt": text, "chosen": "ok", "rejected": "no"}


def chats(text: str) -> dict[str, Any]:
    return {
        "chosen": asked(text),
        "rejected": [*asked(text)[:1], {"role": "assistant", "content": "no"}],
    }


# For each kind of row, a function that builds a row from text and a function that reads the rows.
KINDS: dict[str, tuple[Any, Any]] = {
    "sft, chat": (messages, lambda rows, t: SFTDataset(rows, t, SFTDataConfig(**CHAT))),
    "sft, plain": (
        answers,
        lambda rows, t: SFTDataset(rows, t, SFTDataConfig(**PLAIN, output_key="output")),
    ),
    "kto": (
        answers,
        lambda rows, t: LabelledDataset(rows, t, KTODataConfig(**PLAIN, output_key="output")),
    ),
    "pairs, plain": (
        pairs,
        lambda rows, t: PreferenceDataset(
            rows, t, PreferenceDataConfig(**PLAIN, prompt_key="prompt")
        ),
    ),
    "pairs, chat": (
        chats,
        lambda rows, t: PreferenceDataset(rows, t, PreferenceDataConfig(**CHAT), needs_prompt=True),
    ),
    "prompts, chat": (messages, lambda rows, t: PromptDataset(rows, t, RLDataConfig(**CHAT))),
    "prompts, plain": (answers, lambda rows, t: PromptDataset(rows, t, RLDataConfig(**PLAIN))),
    "prompts, without a template": (
        answers,
        lambda rows, t: PromptDataset(rows, t, RLDataConfig()),
    ),
    "answers to score": (
        answers,
        lambda rows, t: AnsweredDataset(rows, t, InferenceDataConfig(**PLAIN)),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_control_tokens_are_reported_with_the_first_row_that_contains_one(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    row_of, read = KINDS[kind]
    tokenizer = build_tokenizer(PLAIN_CHAT)
    read(Dataset.from_list([row_of("a b")] * 4), tokenizer)
    assert "control tokens" not in capsys.readouterr().err
    read(
        Dataset.from_list([row_of("a b"), row_of("a b"), row_of("a <|end|> b"), row_of("a b")]),
        tokenizer,
    )
    [said] = [line for line in capsys.readouterr().err.splitlines() if "control tokens" in line]
    assert "1 of 4" in said and "row 3" in said and "'<|end|>'" in said


@pytest.mark.parametrize(
    "rows",
    [
        [answers(WHOLE)] * 3 + [answers("a")],  # prompts already rendered by another command
        [answers("<|user|>a")] * 3 + [answers("a")],  # prompts rendered in a different format
        [answers("a") | {"output": "ok <|end|>\n<eos>"}] * 2,  # the data contains end tokens
        [answers("a") | {"output": "ok<eos>"}, answers("a")],
    ],
)
def test_control_tokens_of_rendered_or_terminated_texts_are_not_reported(
    rows: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    SFTDataset(
        Dataset.from_list(rows), build_tokenizer(PLAIN_CHAT), SFTDataConfig(output_key="output")
    )
    assert "control tokens" not in capsys.readouterr().err


def test_end_of_turn_token_at_the_end_of_a_message_is_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = Dataset.from_list([messages("a"), messages("a<|end|>")])
    SFTDataset(rows, build_tokenizer(PLAIN_CHAT), SFTDataConfig(**CHAT))
    assert "'<|end|>'" in capsys.readouterr().err


def test_step_placeholders_that_are_special_tokens_are_not_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = Dataset.from_list([{"input": "a<think>b<think>", "label": ["o", "x"]}] * 3)
    prm = PRMLossConfig(placeholder_token="<think>", reward_tokens=("o", "x"))
    StepDataset(
        rows, build_tokenizer(PLAIN_CHAT), PRMConfig(prm=prm, data=PRMDataConfig(layout="columns"))
    )
    assert "control tokens" not in capsys.readouterr().err
