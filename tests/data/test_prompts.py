"""The policy gets rendered prompts, and the reward gets unchanged labels."""

from __future__ import annotations

import json
from typing import Any

import pytest
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from openrlhf.config.learning import RLDataConfig
from openrlhf.core.trajectory import Prompt
from openrlhf.data.errors import DataError
from openrlhf.data.loading import load_datasets
from openrlhf.data.prompts import PromptDataset
from tests.data.small import PLAIN_CHAT, build_tokenizer, gsm8k, json_lines


def dataset(
    rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase | None = None, **flags: Any
) -> PromptDataset:
    return PromptDataset(
        Dataset.from_list(rows), tokenizer or build_tokenizer(), RLDataConfig(**flags)
    )


def test_plain_prompt_is_inserted_into_the_input_template() -> None:
    row = dataset([{"input": "a"}], input_template="Q{}:")[0]
    assert (row.text, row.tokens) == ("Qa:", [58, 74, 35])


def test_chat_prompt_ends_with_the_generation_prompt() -> None:
    for value in ("a", [{"role": "user", "content": "a"}]):
        row = dataset([{"input": value}], build_tokenizer(PLAIN_CHAT), apply_chat_template=True)[0]
        assert row.text == "<|user|>a<|end|>\n<|assistant|>"
        assert row.tokens == [3, 74, 5, 8, 4]


def test_label_data_source_and_images_have_defaults_if_their_columns_are_missing() -> None:
    row = dataset([{"input": "a"}])[0]
    assert (row.label, row.datasource, row.images) == ("", "default", None)


def test_datasource_and_images_are_read_from_their_columns() -> None:
    row = dataset([{"input": "a", "datasource": "math", "images": ["x.png"]}, {"input": "b"}])
    assert (row[0].datasource, row[0].images) == ("math", ["x.png"])
    assert (row[1].datasource, row[1].images) == ("default", None)


def test_prompt_of_a_conversation_ends_with_the_last_turn_that_is_not_from_the_assistant(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def said(role: str) -> dict[str, str]:
        return {"role": role, "content": role[0]}

    turns = [
        said("system"),
        said("user"),
        said("assistant"),
        said("tool"),
        said("assistant"),
        said("assistant"),
    ]
    rows = [{"input": turns}, {"input": turns[:2]}]
    prompts = dataset(rows, build_tokenizer(PLAIN_CHAT), apply_chat_template=True)
    assert prompts[0].text.endswith("<|assistant|>a<|end|>\n<|tool|>t<|end|>\n<|assistant|>")
    assert prompts[1].text == "<|system|>s<|end|>\n<|user|>u<|end|>\n<|assistant|>"
    assert "1 prompts end with assistant turns" in capsys.readouterr().err
    with pytest.raises(DataError, match="row 1, column 'input': has only assistant turns"):
        dataset([{"input": turns[-1:]}], build_tokenizer(PLAIN_CHAT), apply_chat_template=True)


LABELS = ["42", 42, 4.5, None, True, {"answer": 1}, {"tests": ["a"]}, ["x", 1], "2024-05-06"]


@pytest.mark.parametrize("label", LABELS, ids=str)
def test_label_of_any_json_type_is_read_from_a_file_unchanged(label: Any, write: Any) -> None:
    path = write(
        "prompts.jsonl",
        json_lines([{"input": "a", "label": label}, {"input": "b", "label": label}]),
    )
    rows = load_datasets(path, split="train", max_samples=10, seed=0)
    assert PromptDataset(rows, build_tokenizer(), RLDataConfig(label_key="label"))[1].label == label


def test_labels_of_mixed_types_in_one_column_are_unchanged(write: Any) -> None:
    labels = [
        "x = 42",
        *LABELS[1:],
    ]  # includes a JSON string, which the datasets library would parse
    path = write("prompts.jsonl", json_lines([{"input": "a", "label": label} for label in labels]))
    rows = load_datasets(path, split="train", max_samples=10, seed=0)
    prompts = PromptDataset(rows, build_tokenizer(), RLDataConfig(label_key="label"))
    assert [prompts[place].label for place in range(len(prompts))] == labels


def test_prompt_index_is_the_row_number() -> None:
    prompt = dataset(
        [{"input": "b", "label": "0"}, {"input": "a", "label": "1"}], label_key="label"
    )[1]
    assert prompt == Prompt(index=1, text="a", tokens=[74], label="1")


def test_input_column_may_also_be_the_label_column() -> None:
    assert dataset([{"input": "a"}], label_key="input")[0].label == "a"


def test_long_prompts_are_not_dropped() -> None:
    assert len(dataset([{"input": "a" * 10_000}, {"input": "b"}])) == 2


def test_error_for_an_empty_prompt_names_the_row() -> None:
    with pytest.raises(DataError, match="the dataset, row 2, column 'input': is an empty prompt"):
        dataset([{"input": "a"}, {"input": ""}])


def test_errors_found_before_and_after_tokenization_are_listed_in_row_order() -> None:
    with pytest.raises(DataError) as told:
        dataset([{"input": text} for text in ("a", "", None, "b", "")])
    assert [line.partition(".")[0] for line in str(told.value).splitlines()] == [
        "the dataset, row 2, column 'input': is an empty prompt",
        (
            "the dataset, row 3, column 'input': is null, not a string: the value is empty or this "
            "dataset does not have the column"
        ),
        "the dataset, row 5, column 'input': is an empty prompt",
        "3 of 5 rows are malformed",
    ]


@pytest.mark.parametrize(
    ("value", "chat", "complaint"),
    [
        (3, False, "is a number, not a string"),
        ([{"role": "user", "content": "a"}], False, r"is a list.*--data\.apply_chat_template"),
        (3, True, r"is a number, not a string or a list of chat messages.*--data\.input_key"),
        ([{"content": "a"}], True, "message 0 needs 'role'"),
    ],
)
def test_error_for_a_malformed_prompt_names_the_row(value: Any, chat: bool, complaint: str) -> None:
    with pytest.raises(DataError, match=f"row 1, column 'input': {complaint}"):
        dataset([{"input": value}], build_tokenizer(PLAIN_CHAT), apply_chat_template=chat)


def test_error_for_missing_prompt_columns_lists_the_available_columns() -> None:
    with pytest.raises(
        DataError, match=r"no column 'question', which --data\.input_key names\. It has 'input'"
    ):
        dataset([{"input": "a"}], input_key="question")
    with pytest.raises(DataError, match=r"no column 'answer', which --data\.label_key names"):
        dataset([{"input": "a"}], label_key="answer")


def test_gsm8k_prompts_have_their_answers_as_labels() -> None:
    rows = load_datasets(str(gsm8k()), split="train", max_samples=200, seed=0)
    tokenizer = build_tokenizer(PLAIN_CHAT)
    prompts = PromptDataset(
        rows,
        tokenizer,
        RLDataConfig(input_key="question", label_key="answer", apply_chat_template=True),
    )
    lines = [json.loads(line) for line in gsm8k().read_text().splitlines()[:200]]
    assert [prompts[place].label for place in range(200)] == [line["answer"] for line in lines]
    assert all(line["question"] in prompts[place].text for place, line in enumerate(lines))
