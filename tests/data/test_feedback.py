"""Preference pairs: how texts are joined, truncated, dropped and rejected, token by token."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase

from openrlhf.config.supervised import KTODataConfig, PreferenceDataConfig
from openrlhf.data.errors import DataError
from openrlhf.data.feedback import LabelledDataset, PairRow, PreferenceDataset, check_both_labels
from openrlhf.data.loading import load_datasets
from openrlhf.data.rows import contents_of, number_rows
from tests.data.small import (
    FORGETFUL_CHAT,
    PLAIN_CHAT,
    SPACED_CHAT,
    THINKING_CHAT,
    build_tokenizer,
    json_lines,
)

Rows = list[dict[str, Any]]


def pairs(
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    needs_prompt: bool = False,
    max_len: int = 64,
    **flags: Any,
) -> PreferenceDataset:
    data = PreferenceDataConfig(max_len=max_len, **flags)
    return PreferenceDataset(
        Dataset.from_list(rows), tokenizer or build_tokenizer(), data, needs_prompt=needs_prompt
    )


def chat(rows: Rows, template: str = PLAIN_CHAT, **flags: Any) -> PreferenceDataset:
    tokenizer = build_tokenizer(template, eos="<|end|>")
    return pairs(rows, tokenizer, apply_chat_template=True, **flags)


def text(tokens: Sequence[int]) -> str:
    return "".join(build_tokenizer().convert_ids_to_tokens(list(tokens)))


def answers(row: PairRow) -> tuple[str, str]:
    return text(row.chosen[row.prompt_length :]), text(row.rejected[row.prompt_length :])


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


# ---- plain text


def test_pair_is_encoded_to_the_expected_token_ids() -> None:
    row = pairs([{"q": "Q", "chosen": "ok", "rejected": "no"}], prompt_key="q")[0]
    #                     Q   ok   " " <eos>
    assert row.chosen == [58, 106, 9, 1]
    #                       Q   n   o   " " <eos>
    assert row.rejected == [58, 87, 88, 9, 1]
    assert (row.prompt_length, row.margin) == (0, 0.0)


def test_texts_of_pairs_contain_the_prompt_if_there_is_no_prompt_column() -> None:
    row = pairs(
        [{"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"}]
    )[0]
    assert text(row.chosen) == "\n\nHuman: a\n\nAssistant: b <eos>"
    assert text(row.rejected) == "\n\nHuman: a\n\nAssistant: c <eos>"


def test_input_template_is_applied_only_to_the_prompt_column() -> None:
    rows = [{"q": "{}", "chosen": "{x}", "rejected": "y"}]
    row = pairs(rows, prompt_key="q", input_template="A{}B")[0]
    assert (text(row.chosen), text(row.rejected)) == ("A{}B{x} <eos>", "A{}By <eos>")
    whole = pairs([{"chosen": "x", "rejected": "y"}], input_template="A{}B")[0]
    assert text(whole.chosen) == "x <eos>"


def test_trailing_newlines_are_removed_and_the_eos_token_is_not_doubled() -> None:
    row = pairs([{"chosen": "a\n\n", "rejected": "b<eos>\n"}])[0]
    assert (text(row.chosen), text(row.rejected)) == ("a <eos>", "b<eos>")


def test_truncated_text_ends_with_the_eos_token_and_is_counted() -> None:
    rows = [{"chosen": "abcdefg", "rejected": "xy"}, {"chosen": "abcd", "rejected": "x"}]
    data = pairs(rows, max_len=6)
    assert (text(data[0].chosen), text(data[0].rejected)) == ("abcde<eos>", "xy <eos>")
    assert text(data[1].chosen) == "abcd <eos>"
    assert (
        data.summary
        == "2 of 2 pairs kept. 1 of the kept pairs were truncated to 6 tokens (--data.max_len)."
    )


def test_columns_are_read_by_their_configured_names() -> None:
    row = pairs([{"good": "a", "bad": "b"}], chosen_key="good", rejected_key="bad")[0]
    assert (text(row.chosen), text(row.rejected)) == ("a <eos>", "b <eos>")


# ---- margins


def test_margin_is_parsed_as_a_number_and_defaults_to_zero() -> None:
    rows = [{"chosen": "a", "rejected": "b", "margin": value} for value in (0.5, None, -2.0)]
    assert [row.margin for row in map(pairs(rows).__getitem__, range(3))] == [0.5, 0.0, -2.0]
    whole = [{"chosen": "a", "rejected": "b", "margin": 3}]
    assert pairs(whole)[0].margin == 3.0


@pytest.mark.parametrize(
    ("value", "seen"),
    [("half", "'half', not a finite number"), (True, "True, not"), (float("nan"), "nan, not")],
)
def test_error_for_an_invalid_margin_names_the_row_and_the_column(value: Any, seen: str) -> None:
    rows = [
        {"chosen": "a", "rejected": "b", "margin": None},
        {"chosen": "a", "rejected": "b", "margin": value},
    ]
    with pytest.raises(DataError, match=rf"row 2, column 'margin': is {seen}"):
        pairs(rows)


# ---- chat messages


def test_full_conversations_are_rendered_without_a_generation_prompt() -> None:
    row = chat([{"chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("c")]}])[
        0
    ]
    assert text(row.chosen) == "<|user|>a<|end|>\n<|assistant|>b<|end|>"
    assert text(row.rejected) == "<|user|>a<|end|>\n<|assistant|>c<|end|>"
    assert row.prompt_length == 0


def test_conversation_that_ends_with_a_user_turn_can_be_scored_as_a_whole() -> None:
    row = chat([{"chosen": [user("a")], "rejected": [user("b")]}])[0]
    assert text(row.chosen) == "<|user|>a<|end|>"


@pytest.mark.parametrize("prompt", ["a", [user("a")]])
@pytest.mark.parametrize("chosen", ["b", [assistant("b")]])
def test_answers_given_as_strings_or_messages_follow_the_prompt_column(
    prompt: Any, chosen: Any
) -> None:
    rejected = "c" if isinstance(chosen, str) else [assistant("c")]
    rows = [{"q": prompt, "chosen": chosen, "rejected": rejected}]
    row = chat(rows, prompt_key="q", needs_prompt=True)[0]
    assert text(row.chosen[: row.prompt_length]) == "<|user|>a<|end|>\n<|assistant|>"
    assert answers(row) == ("b<|end|>", "c<|end|>")


# ---- prompts that are not scored


def test_prompt_is_read_from_the_prompt_column() -> None:
    rows = [{"q": "Q", "chosen": "ok", "rejected": "no"}]
    row = pairs(rows, prompt_key="q", input_template="{}:", needs_prompt=True)[0]
    assert row.prompt_length == 2
    assert answers(row) == ("ok <eos>", "no <eos>")


def test_token_across_the_prompts_trailing_space_and_an_answer_is_scored_in_both_answers() -> None:
    rows = [{"q": "A", "chosen": "bee", "rejected": "cat"}]
    row = pairs(rows, prompt_key="q", input_template="{}: ", needs_prompt=True)[0]
    assert answers(row) == (" bee <eos>", " cat <eos>")


def test_prompt_of_a_conversation_is_every_message_except_the_last() -> None:
    history = [user("a"), assistant("x"), user("c")]
    rows = [{"chosen": [*history, assistant("ok")], "rejected": [*history, assistant("no")]}]
    for template in (PLAIN_CHAT, SPACED_CHAT):
        row = chat(rows, template, needs_prompt=True)[0]
        assert answers(row)[0].replace(" ", "").startswith("ok")
        assert answers(row)[1].replace(" ", "").startswith("no")


def test_multi_message_answer_is_scored_from_its_first_message() -> None:
    rows = [
        {
            "q": "a",
            "chosen": [assistant("b"), user("c"), assistant("d")],
            "rejected": [assistant("e"), user("c"), assistant("d")],
        }
    ]
    row = chat(rows, prompt_key="q", needs_prompt=True)[0]
    assert answers(row)[0] == "b<|end|>\n<|user|>c<|end|>\n<|assistant|>d<|end|>"


@pytest.mark.parametrize(
    ("template", "opening"),
    [
        (FORGETFUL_CHAT, ""),
        (THINKING_CHAT, "</think>"),  # the generation prompt ends with "<think>"
        # The generation prompt's "<think>" is not in the rendered answer.
        (PLAIN_CHAT.replace("<|assistant|>", "<|assistant|><think>"), ""),
    ],
)
def test_answer_is_found_if_the_template_rewrites_the_history_or_adds_thoughts(
    template: str, opening: str
) -> None:
    history = [user("a"), assistant("<think>m</think>x"), user("c")]
    rows = [{"chosen": [*history, assistant("so it is")], "rejected": [*history, assistant("so")]}]
    row = chat(rows, template, needs_prompt=True, max_len=99)[0]
    assert answers(row) == (f"{opening}so it is<|end|>", f"{opening}so<|end|>")


def test_plain_text_rows_without_a_prompt_column_are_scored_in_full() -> None:
    row = pairs([{"chosen": "Q: a", "rejected": "Q: b"}], needs_prompt=True)[0]
    assert row.prompt_length == 0


TURNS = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"


def test_prompt_of_a_transcript_is_everything_before_its_last_answer() -> None:
    rows = [{"chosen": f"{TURNS} ok", "rejected": f"{TURNS} no"}]
    row = pairs(rows, needs_prompt=True, max_len=99)[0]
    assert (text(row.chosen[: row.prompt_length]), answers(row)) == (
        TURNS,
        (" ok <eos>", " no <eos>"),
    )
    as_messages = chat(rows, needs_prompt=True, max_len=99)[0]
    assert text(as_messages.chosen) == (
        "<|user|>a<|end|>\n<|assistant|>b<|end|>\n<|user|>c<|end|>\n<|assistant|>ok<|end|>"
    )
    assert answers(as_messages) == ("ok<|end|>", "no<|end|>")


def test_texts_without_a_prompt_produce_a_notice_only_if_a_prompt_is_needed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [{"chosen": "a", "rejected": "b"}]
    pairs(rows)
    pairs([{"q": "Q", **rows[0]}], prompt_key="q", needs_prompt=True)
    assert capsys.readouterr().err == ""
    pairs(rows, needs_prompt=True)
    assert "--data.prompt_key" in capsys.readouterr().err


def test_prompts_of_both_answers_include_the_tools() -> None:
    template = "{% for tool in tools %}[{{ tool.name }}]{% endfor %}" + PLAIN_CHAT
    rows = [{"q": "a", "chosen": "ok", "rejected": "no", "tools": [{"name": "add"}]}]
    row = chat(rows, template, prompt_key="q", needs_prompt=True)[0]
    assert text(row.chosen[: row.prompt_length]) == "[add]<|user|>a<|end|>\n<|assistant|>"


def test_answers_with_different_histories_are_scored_from_the_first_difference() -> None:
    chosen, rejected = (
        [user("a"), assistant("ok")],
        [user("a much longer question"), assistant("no")],
    )
    row = chat([{"chosen": chosen, "rejected": rejected}], needs_prompt=True)[0]
    assert text(row.chosen[: row.prompt_length]) == "<|user|>a"


def judged(row: PairRow) -> tuple[str, str]:
    """Return the scored tokens of both answers, decoded."""
    sides = zip((row.chosen, row.rejected), row.masks, strict=True)
    chosen, rejected = (
        text([token for token, judge in zip(tokens, mask, strict=True) if judge])
        for tokens, mask in sides
    )
    return chosen, rejected


ASKED = [user("a"), assistant("b"), user("c")]


@pytest.mark.parametrize(
    ("chosen", "rejected", "expected"),
    [
        (
            [user("a"), assistant("ok")],
            [*ASKED, assistant("no")],
            ("ok<|end|>", "b<|end|>\nno<|end|>"),
        ),
        (
            [*ASKED, assistant("no")],
            [user("a"), assistant("b")],
            ("b<|end|>\nno<|end|>", "b<|end|>"),
        ),
        ([user("a"), assistant("ok")], [user("d"), assistant("no")], ("ok<|end|>", "no<|end|>")),
        ([*ASKED, assistant("ok")], [*ASKED, assistant("no")], ("ok<|end|>", "no<|end|>")),
        (
            [user("a"), assistant("x"), user("c"), assistant("ok")],
            [*ASKED, assistant("no")],
            ("x<|end|>\nok<|end|>", "b<|end|>\nno<|end|>"),
        ),
    ],
    ids=["longer rejected", "longer chosen", "other questions", "same history", "other history"],
)
@pytest.mark.parametrize("column", [True, False], ids=["prompt column", "prompt inside"])
def test_only_assistant_turns_are_scored_if_one_chat_has_an_additional_exchange(
    chosen: Rows, rejected: Rows, expected: tuple[str, str], column: bool
) -> None:
    row = {"chosen": chosen, "rejected": rejected}
    flags = {}
    if column and chosen[0] == rejected[0]:
        row |= {"q": chosen[:1], "chosen": chosen[1:], "rejected": rejected[1:]}
        flags = {"prompt_key": "q"}
    assert judged(chat([row], needs_prompt=True, max_len=99, **flags)[0]) == expected


@pytest.mark.parametrize(
    "prompt", ["", "\n\nHuman: a\n\nAssistant:"], ids=["prompt inside", "prompt column"]
)
def test_only_assistant_turns_are_scored_if_one_transcript_has_an_additional_exchange(
    prompt: str,
) -> None:
    whole = {"chosen": f"{TURNS} no", "rejected": "\n\nHuman: a\n\nAssistant: ok"}
    row = {name: value.removeprefix(prompt) for name, value in whole.items()} | {"q": prompt}
    flags = {"prompt_key": "q"} if prompt else {}
    assert judged(pairs([row], needs_prompt=True, max_len=99, **flags)[0]) == (
        " b no <eos>",
        " ok <eos>",
    )


def test_pair_is_dropped_if_truncation_removes_one_answer() -> None:
    rows = [
        {
            "chosen": [user("a"), assistant("ok")],
            "rejected": [user("abcdefghijklmnopqrst"), assistant("no")],
        },
        {"chosen": [user("a"), assistant("ok")], "rejected": [user("a"), assistant("no")]},
    ]
    assert len(chat(rows, needs_prompt=True, max_len=16)) == 1


def test_hash_of_pairs_without_an_additional_exchange_matches_earlier_releases() -> None:
    rows = chat(
        [{"chosen": [user("a"), assistant("ok")], "rejected": [user("a"), assistant("no")]}],
        needs_prompt=True,
    )
    columns = ["chosen", "rejected", "prompt_length", "margin", "datasource"]
    assert b"".join(rows.contents()) == b"".join(contents_of(rows.rows.select_columns(columns)))


def test_pair_with_a_long_prompt_is_dropped_only_if_a_prompt_is_needed() -> None:
    rows = [
        {"q": "abcdefgh", "chosen": "x", "rejected": "y"},
        {"q": "abcdefg", "chosen": "x", "rejected": "y"},
    ]
    kept = pairs(rows, prompt_key="q", max_len=10, needs_prompt=True)
    assert [text(kept[0].chosen)] == ["abcdefgx <eos>"]
    assert kept.summary == (
        "1 of 2 pairs kept, dropped 1 with a prompt of 8 tokens or more (--data.max_len 10)."
    )
    assert len(pairs(rows, prompt_key="q", max_len=10)) == 2


# ---- dropped pairs


def test_pairs_with_equal_texts_are_dropped_and_counted_by_reason() -> None:
    rows = [
        {"chosen": "a", "rejected": "b"},
        {"chosen": "a", "rejected": "a\n"},
        {"chosen": "abcdefgh", "rejected": "abcdefgx"},
        {"chosen": "abcdefg", "rejected": "abcdefgx"},
    ]
    kept = pairs(rows, max_len=7)
    assert text(kept[0].chosen) == "a <eos>"
    assert kept.summary == (
        "1 of 4 pairs kept, dropped 2 that differ only after --data.max_len 7 tokens, "
        "1 whose chosen and rejected text are the same."
    )


def test_error_reports_the_drop_counts_if_no_row_is_left() -> None:
    with pytest.raises(DataError, match=r"0 of 1 pairs kept, dropped 1 whose.*--data\.chosen_key"):
        pairs([{"chosen": "a", "rejected": "a"}])


# ---- malformed rows and missing columns


def test_error_for_a_missing_column_names_the_evaluation_dataset_that_lacks_it() -> None:
    """Training rows may have a column that is missing from the --eval.dataset rows."""
    rows = number_rows(Dataset.from_list([{"chosen": "a", "rejected": "b"}]), "held_out.jsonl")
    with pytest.raises(
        DataError, match=r"^held_out\.jsonl has no column 'text', which --data\.prompt_key names"
    ):
        PreferenceDataset(rows, build_tokenizer(), PreferenceDataConfig(prompt_key="text"))


@pytest.mark.parametrize("flag", ["prompt_key", "chosen_key", "rejected_key"])
def test_error_for_a_missing_column_names_its_flag_and_the_available_columns(flag: str) -> None:
    with pytest.raises(
        DataError,
        match=rf"no column 'text', which --data\.{flag} names\. It has 'chosen', 'rejected'",
    ):
        pairs([{"chosen": "a", "rejected": "b"}], **{flag: "text"})


def test_error_for_a_malformed_pair_names_the_file_the_row_and_the_column(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(json_lines([{"chosen": "a", "rejected": value} for value in ("b", "c", None)]))
    rows = load_datasets(str(path), split="train", max_samples=10, seed=0)
    with pytest.raises(DataError, match=r"pairs\.jsonl, row 3, column 'rejected': is null"):
        PreferenceDataset(rows, build_tokenizer(), PreferenceDataConfig(max_len=64))


def test_error_for_messages_without_a_template_or_strings_with_a_template_names_the_flag() -> None:
    messages = [user("a"), assistant("b")]
    with pytest.raises(DataError, match=r"column 'chosen': is a list.*--data\.apply_chat_template"):
        pairs([{"chosen": messages, "rejected": messages}])
    with pytest.raises(
        DataError, match=r"column 'chosen': is a string, not a list of chat.*--data\.prompt_key"
    ):
        chat([{"chosen": "a", "rejected": "b"}])


def test_error_for_a_malformed_message_names_the_row_and_the_message() -> None:
    bad = [{"speaker": "human", "value": "a"}]
    with pytest.raises(DataError, match=r"row 1, column 'chosen': message 0 needs 'role'"):
        chat([{"chosen": bad, "rejected": bad}])


def test_chat_without_an_answer_is_rejected_if_the_answer_is_scored() -> None:
    with pytest.raises(DataError, match="row 1, column 'chosen': the last message is not from"):
        chat([{"chosen": [user("a")], "rejected": [user("b")]}], needs_prompt=True)


def test_missing_chat_template_is_reported_before_any_row_is_read() -> None:
    with pytest.raises(DataError, match=r"--data\.tokenizer_chat_template"):
        pairs([{"chosen": [user("a")], "rejected": [user("b")]}], apply_chat_template=True)


# ---- real data and large datasets


def test_pairs_do_not_depend_on_the_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"chosen": f"{number}:", "rejected": "x", "margin": number} for number in range(40)]
    alone = pairs(rows)
    monkeypatch.setattr("openrlhf.data.rows.MANY_ROWS", 20)
    assert list(map(pairs(rows).__getitem__, range(40))) == list(map(alone.__getitem__, range(40)))


def check_harmless(data_dir: Path, count: int, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that tokens decode to the texts and that only pairs with equal texts are dropped."""
    file = data_dir / "hh-rlhf" / "harmless-base-test.jsonl.gz"
    with gzip.open(file, "rt") as lines:
        texts = [json.loads(line) for line in itertools.islice(lines, count)]
    rows = load_datasets(str(file), split="train", max_samples=count, seed=0)
    data = PreferenceDataset(rows, tokenizer, PreferenceDataConfig(max_len=1 << 16))
    # ByT5's end-of-text token removes the space before it.
    texts = [(row["chosen"].rstrip(), row["rejected"].rstrip()) for row in texts]
    texts = [pair for pair in texts if pair[0] != pair[1]]
    assert len(data) == len(texts) >= 0.9 * count
    for place, (chosen, rejected) in enumerate(texts):
        pair, end = data[place], str(tokenizer.eos_token)
        assert tokenizer.decode(pair.chosen) == chosen + end
        assert tokenizer.decode(pair.rejected) == rejected + end


def test_slice_of_hh_rlhf_is_read_and_tokenized_unchanged(data_dir: Path) -> None:
    check_harmless(data_dir, 100, ByT5Tokenizer())


@pytest.mark.verify
def test_all_of_hh_rlhf_is_read_and_tokenized_unchanged(data_dir: Path) -> None:
    check_harmless(data_dir, 2312, ByT5Tokenizer())


@pytest.mark.parametrize(
    ("labels", "found"), [([1, 1], [False]), ([False, False], [False]), (["true", "0"], [])]
)
def test_labels_that_are_all_equal_produce_a_notice(labels: list[Any], found: list[bool]) -> None:
    rows = [{"input": "a", "output": "ok", "label": label} for label in labels]
    labelled = LabelledDataset(
        Dataset.from_list(rows), build_tokenizer(), KTODataConfig(max_len=64, output_key="output")
    )
    findings = check_both_labels(labelled, column="label")
    assert [finding.fails for finding in findings] == found
