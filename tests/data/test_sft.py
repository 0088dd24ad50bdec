"""Tokens and loss masks for each kind of SFT row, spelled out in full."""

from __future__ import annotations

import itertools
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase

from openrlhf.config.supervised import SFTDataConfig
from openrlhf.data.errors import DataError
from openrlhf.data.loading import load_datasets
from openrlhf.data.sft import SFTDataset, SFTRow
from tests.data.small import (
    FORGETFUL_CHAT,
    MARKED_CHAT,
    PLAIN_CHAT,
    SPACED_CHAT,
    build_tokenizer,
    gsm8k,
)


def dataset(
    rows: list[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    pretrain: bool = False,
    max_len: int = 64,
    **flags: Any,
) -> SFTDataset:
    data = SFTDataConfig(max_len=max_len, **flags)
    return SFTDataset(
        Dataset.from_list(rows), tokenizer or build_tokenizer(), data, pretrain=pretrain
    )


def show(row: SFTRow) -> list[str]:
    """Return a row as text segments, with targets in [brackets]."""
    tokens = build_tokenizer().convert_ids_to_tokens(row.tokens)
    runs = itertools.groupby(zip(tokens, row.loss_mask, strict=True), key=lambda pair: pair[1])
    texts = [(learned, "".join(token for token, _ in run)) for learned, run in runs]
    return [f"[{text}]" if learned else text for learned, text in texts]


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


# ---- plain text


def test_plain_text_prompt_and_response_are_encoded_to_the_expected_token_ids() -> None:
    row = dataset([{"input": "Q", "output": "ok"}], output_key="output", input_template="{}:")[0]
    #                    Q   :  ok       <eos>
    assert row.tokens == [58, 35, 106, 9, 1]
    assert row.loss_mask == [False, False, True, True, True]


def test_error_counts_malformed_rows_and_lists_the_first_ones() -> None:
    """A row's prompt is checked before its answer."""
    rows = [{"input": "Q", "output": "ok" if place % 3 else None} for place in range(21)]
    with pytest.raises(DataError) as told:
        dataset(rows, output_key="output")
    *named, count = str(told.value).splitlines()
    assert [line.partition(":")[0] for line in named] == [
        f"the dataset, row {row}, column 'output'" for row in (1, 4, 7, 10, 13)
    ]
    assert count == "7 of 21 rows are malformed."
    with pytest.raises(DataError) as told:
        dataset([{"input": None, "output": None}, *rows[1:3]], output_key="output")
    assert str(told.value).startswith(
        "the dataset, row 1, column 'input': is null"
    ) and "\n" not in str(told.value)


def test_missing_eos_token_is_appended_after_a_space() -> None:
    row = dataset([{"input": "Q:", "output": "ok\n\n"}], output_key="output")[0]
    assert show(row) == ["Q:", "[ok <eos>]"]


def test_eos_token_is_not_doubled() -> None:
    row = dataset([{"input": "Q:", "output": "ok<eos>\n"}], output_key="output")[0]
    assert show(row) == ["Q:", "[ok<eos>]"]


def test_first_response_token_is_a_target_if_merged_with_the_last_space_of_the_prompt() -> None:
    row = dataset(
        [{"input": "a", "output": "bee"}], output_key="output", input_template="A: {}\nB: "
    )[0]
    assert show(row) == ["A: a\nB:", "[ bee <eos>]"]


def test_truncated_response_ends_with_the_eos_token() -> None:
    rows = dataset([{"input": "ab", "output": "cdefghij"}], output_key="output", max_len=6)
    assert show(rows[0]) == ["ab", "[cde<eos>]"]
    assert (
        rows.summary
        == "1 of 1 rows kept. 1 of the kept rows were truncated to 6 tokens (--data.max_len)."
    )


def test_braces_in_the_data_are_preserved() -> None:
    row = dataset(
        [{"input": "{}{0}", "output": "{x}"}], output_key="output", input_template="A{}B"
    )[0]
    assert show(row) == ["A{}{0}B", "[{x} <eos>]"]


def test_tokenizer_without_offsets_gives_the_same_loss_mask() -> None:
    tokenizer = ByT5Tokenizer()
    row = dataset([{"input": "Q: ", "output": "ok"}], tokenizer, output_key="output")[0]
    assert (
        row.loss_mask == [False] * 3 + [True] * 3
    )  # the tokens are o, k and end-of-text, which removes the space before it


# ---- pretraining text


def test_pretraining_text_is_trained_on_unchanged_except_for_its_first_token() -> None:
    row = dataset([{"input": "abc\n"}], pretrain=True, input_template="X{}")[0]
    assert show(row) == ["a", "[bc\n]"]


def test_pretraining_text_is_truncated_without_adding_an_eos_token() -> None:
    row = dataset([{"input": "abcdef"}], pretrain=True, max_len=3)[0]
    assert show(row) == ["a", "[bc]"]


def test_pretraining_text_does_not_require_an_output_column() -> None:
    row = dataset([{"input": "abc"}], pretrain=True, output_key="output")[0]
    assert show(row) == ["a", "[bc]"]


def test_single_token_pretraining_text_is_dropped() -> None:
    rows = dataset([{"input": "a"}, {"input": ""}, {"input": "ab"}], pretrain=True)
    assert rows.summary == "1 of 3 rows kept, dropped 2 with fewer than two tokens."


# ---- chat messages


def test_chat_is_encoded_to_the_expected_token_ids() -> None:
    row = dataset(
        [{"input": [user("a"), assistant("ok")]}],
        build_tokenizer(PLAIN_CHAT),
        apply_chat_template=True,
    )[0]
    #                <|user|> a <|end|> \n <|assistant|> ok <|end|> <eos>
    assert row.tokens == [3, 74, 5, 8, 4, 106, 5, 1]
    assert row.loss_mask == [False] * 5 + [True] * 3


def test_no_second_eos_token_is_added_after_a_template_that_ends_with_one() -> None:
    tokenizer = build_tokenizer(PLAIN_CHAT, eos="<|end|>")
    row = dataset([{"input": [user("a"), assistant("ok")]}], tokenizer, apply_chat_template=True)[0]
    assert show(row) == ["<|user|>a<|end|>\n<|assistant|>", "[ok<|end|>]"]


def test_two_string_columns_become_a_user_message_and_an_assistant_message() -> None:
    tokenizer = build_tokenizer(PLAIN_CHAT, eos="<|end|>")
    row = dataset(
        [{"q": "a", "r": "ok"}], tokenizer, input_key="q", output_key="r", apply_chat_template=True
    )[0]
    assert show(row) == ["<|user|>a<|end|>\n<|assistant|>", "[ok<|end|>]"]


def test_output_column_continues_the_messages_of_the_input_column() -> None:
    tokenizer = build_tokenizer(PLAIN_CHAT, eos="<|end|>")
    history = [user("a"), assistant("b"), user("c")]
    for output in ("ok", [assistant("ok")]):
        row = dataset(
            [{"q": history, "r": output}],
            tokenizer,
            input_key="q",
            output_key="r",
            apply_chat_template=True,
        )[0]
        assert show(row)[-1] == "[ok<|end|>]"
        assert len(show(row)) == 2


ANSWERS = [assistant("one"), user("two"), assistant("three")]


@pytest.mark.parametrize(
    ("template", "multiturn", "learned"),
    [
        (PLAIN_CHAT, False, ["one<|end|>\n<|user|>two<|end|>\n<|assistant|>three<|end|>"]),
        (PLAIN_CHAT, True, ["one<|end|>\n", "three<|end|>"]),
        (MARKED_CHAT, False, ["one<|end|>", "three<|end|>"]),
        (MARKED_CHAT, True, ["one<|end|>", "three<|end|>"]),
    ],
)
def test_output_column_with_several_messages_is_the_response(
    template: str, multiturn: bool, learned: list[str]
) -> None:
    """By default, the entire output column is a target.

    With --data.multiturn, or if the template marks targets, only the assistant's text is a target.
    """
    rows = [{"p": [user("a")], "r": ANSWERS}]
    tokenizer = build_tokenizer(template, eos="<|end|>")
    flags = {
        "input_key": "p",
        "output_key": "r",
        "apply_chat_template": True,
        "multiturn": multiturn,
    }
    shown = show(dataset(rows, tokenizer, **flags)[0])
    assert shown[0] == "<|user|>a<|end|>\n<|assistant|>"
    assert [text for text in shown if text[0] == "["] == [f"[{text}]" for text in learned]


def test_output_messages_before_the_first_assistant_message_belong_to_the_prompt() -> None:
    rows = [{"p": [user("a")], "r": [user("b"), *ANSWERS[:1]]}]
    tokenizer = build_tokenizer(PLAIN_CHAT, eos="<|end|>")
    row = dataset(rows, tokenizer, input_key="p", output_key="r", apply_chat_template=True)[0]
    assert show(row) == ["<|user|>a<|end|>\n<|user|>b<|end|>\n<|assistant|>", "[one<|end|>]"]


def test_first_response_token_is_a_target_if_the_template_ends_in_a_space() -> None:
    row = dataset(
        [{"input": [user("a"), assistant("bee")]}],
        build_tokenizer(SPACED_CHAT),
        apply_chat_template=True,
    )[0]
    assert show(row) == ["A: a\nB:", "[ bee <eos>]"]


TWO_TURNS = [user("a"), assistant("ok"), user("c"), assistant("no")]


def test_multiturn_targets_are_all_answers_and_their_end_of_turn_tokens() -> None:
    tokenizer = build_tokenizer(PLAIN_CHAT, eos="<|end|>")
    row = dataset([{"input": TWO_TURNS}], tokenizer, apply_chat_template=True, multiturn=True)[0]
    assert show(row) == [
        "<|user|>a<|end|>\n<|assistant|>",
        "[ok<|end|>\n]",
        "<|user|>c<|end|>\n<|assistant|>",
        "[no<|end|>]",
    ]


def test_multiturn_is_rejected_for_plain_text() -> None:
    with pytest.raises(
        DataError,
        match=r"--data\.multiturn requires --data\.apply_chat_template",
    ):
        dataset([{"input": "a", "output": "ok"}], output_key="output", multiturn=True)


def test_only_the_last_answer_is_a_target_without_multiturn() -> None:
    for template in (PLAIN_CHAT, MARKED_CHAT):
        row = dataset(
            [{"input": TWO_TURNS}],
            build_tokenizer(template, eos="<|end|>"),
            apply_chat_template=True,
        )[0]
        assert show(row)[1:] == ["[no<|end|>]"]


def test_output_column_is_appended_as_the_last_answer_with_multiturn() -> None:
    tokenizer = build_tokenizer(PLAIN_CHAT, eos="<|end|>")
    split = {"q": TWO_TURNS[:-1], "r": "no"}
    together = dataset(
        [{"q": TWO_TURNS}], tokenizer, input_key="q", apply_chat_template=True, multiturn=True
    )
    apart = dataset(
        [split], tokenizer, input_key="q", output_key="r", apply_chat_template=True, multiturn=True
    )
    assert apart[0] == together[0]


def test_multiturn_targets_are_the_spans_marked_by_the_template() -> None:
    tokenizer = build_tokenizer(MARKED_CHAT, eos="<|end|>")
    row = dataset([{"input": TWO_TURNS}], tokenizer, apply_chat_template=True, multiturn=True)[0]
    assert show(row) == [
        "<|user|>a<|end|>\n<|assistant|>",
        "[ok<|end|>]",
        "\n<|user|>c<|end|>\n<|assistant|>",
        "[no<|end|>]",
    ]


def test_eos_token_is_a_target_even_if_the_template_does_not_mark_it() -> None:
    marks_words_only = MARKED_CHAT.replace(
        "<|end|>{% endgeneration %}", "{% endgeneration %}<|end|>"
    )
    tokenizer = build_tokenizer(marks_words_only, eos="<|end|>")
    row = dataset([{"input": TWO_TURNS[:2]}], tokenizer, apply_chat_template=True)[0]
    assert show(row) == ["<|user|>a<|end|>\n<|assistant|>", "[ok<|end|>]"]


def test_answers_rewritten_by_the_template_are_counted_and_not_used_as_targets() -> None:
    tokenizer = build_tokenizer(FORGETFUL_CHAT, eos="<|end|>")
    messages = [
        user("a"),
        assistant("<think>m</think>ok"),
        user("c"),
        assistant("<think>s</think>no"),
    ]
    rows = dataset([{"input": messages}], tokenizer, apply_chat_template=True, multiturn=True)
    assert show(rows[0]) == [
        "<|user|>a<|end|>\n<|assistant|>ok<|end|>\n<|user|>c<|end|>\n<|assistant|>",
        "[<think>s</think>no<|end|>]",
    ]
    assert "1 assistant turns are not trained on" in rows.summary


def test_messages_after_the_last_answer_are_removed() -> None:
    tokenizer = build_tokenizer(PLAIN_CHAT, eos="<|end|>")
    row = dataset(
        [{"input": [user("a"), assistant("ok"), user("bye")]}], tokenizer, apply_chat_template=True
    )[0]
    assert show(row) == ["<|user|>a<|end|>\n<|assistant|>", "[ok<|end|>]"]


# ---- excluded turns, tools and alternative role names


def said(content: str, **fields: Any) -> dict[str, Any]:
    return assistant(content) | fields


@pytest.mark.parametrize("template", [PLAIN_CHAT, MARKED_CHAT])
@pytest.mark.parametrize("off", [{"loss": False}, {"weight": 0}, {"weight": 0.0, "loss": None}])
def test_turns_with_loss_false_are_not_targets(template: str, off: dict[str, Any]) -> None:
    messages = [
        user("a"),
        said("bad", **off),
        user("c"),
        said("ok"),
        user("d"),
        said("no", weight=1),
    ]
    tokenizer = build_tokenizer(template, eos="<|end|>")
    shown = show(
        dataset([{"input": messages}], tokenizer, apply_chat_template=True, multiturn=True)[0]
    )
    assert [text.rstrip("\n]") for text in shown if text[0] == "["] == ["[ok<|end|>", "[no<|end|>"]
    assert "bad<|end|>" in shown[0]


def test_messages_after_the_last_target_turn_are_removed() -> None:
    messages = [user("a"), said("ok"), user("c"), said("bad", loss=False)]
    tokenizer = build_tokenizer(PLAIN_CHAT, eos="<|end|>")
    row = dataset([{"input": messages}], tokenizer, apply_chat_template=True, multiturn=True)[0]
    assert show(row) == ["<|user|>a<|end|>\n<|assistant|>", "[ok<|end|>]"]


def test_row_without_a_target_turn_is_dropped_and_counted() -> None:
    rows = [{"input": TWO_TURNS}, {"input": [user("a"), said("ok", loss=False)]}]
    kept = dataset(rows, build_tokenizer(PLAIN_CHAT), apply_chat_template=True, multiturn=True)
    assert kept.summary == "1 of 2 rows kept, dropped 1 without a turn to train on."


@pytest.mark.parametrize(
    ("messages", "multiturn", "complaint"),
    [
        (
            [user("a") | {"loss": True}, said("ok")],
            True,
            r"message 0 \(user\) has loss True: ",
        ),
        (
            [user("a"), said("ok", weight=0.5)],
            True,
            r"message 1 \(assistant\) has weight 0.5: ",
        ),
        (
            [user("a"), said("ok", loss="yes")],
            True,
            r"message 1 \(assistant\) has loss 'yes': ",
        ),
        (
            [user("a"), said("ok", loss=False)],
            False,
            r"message 1 \(assistant\) has loss False: .*--data\.multiturn",
        ),
    ],
)
def test_error_for_an_invalid_loss_or_weight_field_names_the_row(
    messages: list[dict[str, Any]], multiturn: bool, complaint: str
) -> None:
    rows = [{"input": TWO_TURNS}, {"input": messages}]
    with pytest.raises(DataError, match=f"row 2, column 'input': {complaint}"):
        dataset(rows, build_tokenizer(PLAIN_CHAT), apply_chat_template=True, multiturn=multiturn)


def test_all_sharegpt_speakers_are_mapped_to_roles() -> None:
    template = (
        "{% for tool in tools %}[{{ tool.name }}]{% endfor %}"
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
        "{% for call in m.tool_calls %}{{ call.function.name }}:{{ call.function.arguments.x }}"
        "{% endfor %}<|end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    turns = [
        {"from": "system", "value": "s"},
        {"from": "human", "value": "a"},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"x": 1}}'},
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "two"},
    ]
    rows = [{"conversations": turns, "tools": '[{"name": "add"}]'}]
    flags = {"input_key": "conversations", "apply_chat_template": True, "multiturn": True}
    row = dataset(rows, build_tokenizer(template, eos="<|end|>"), max_len=200, **flags)[0]
    assert show(row) == [
        "[add]<|system|>s<|end|>\n<|user|>a<|end|>\n<|assistant|>",
        "[add:1<|end|>\n]",
        "<|tool|>2<|end|>\n<|assistant|>",
        "[two<|end|>]",
    ]


def test_template_gets_call_arguments_as_objects_without_the_nulls_added_by_arrow() -> None:
    template = (
        "{% for m in messages %}{{ m.role }}{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}"
    )
    texts, objects = (
        ['{"x": 1}', "", None],
        [{"x": 1}, {"y": 2}],
    )  # Arrow adds nulls for missing fields to both objects, as it does in Parquet files
    for arguments, expected in (
        (texts, ['{"x": 1}', "{}", "{}"]),
        (objects, ['{"x": 1}', '{"y": 2}']),
    ):
        calls = [{"function": {"name": "f", "arguments": each}} for each in arguments]
        rows = [{"input": [user("a"), said("", tool_calls=[call])]} for call in calls]
        shown = dataset(rows, build_tokenizer(template), apply_chat_template=True, max_len=200)
        assert [
            "".join(show(shown[place])).split('arguments": ')[1][:-10] for place in range(len(rows))
        ] == expected


def test_tool_calls_with_top_level_name_and_arguments_are_unchanged() -> None:
    template = (
        "{% for m in messages %}{{ m.role }}{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}"
    )
    rows = [{"input": [user("a"), said("", tool_calls=[{"name": "f", "arguments": '{"x": 1}'}])]}]
    shown = "".join(
        show(dataset(rows, build_tokenizer(template), apply_chat_template=True, max_len=200)[0])
    )
    assert '[{"name": "f", "arguments": {"x": 1}}]' in shown


@pytest.mark.parametrize(
    ("tools", "complaint"),
    [
        ("[add]", "is a string, .*JSON"),
        ([1], "is a list, not a list of tool definitions"),
        ({"a": 1}, "is an object"),
    ],
)
def test_error_for_invalid_tool_definitions_names_the_row(tools: Any, complaint: str) -> None:
    with pytest.raises(DataError, match=f"row 1, column 'tools': {complaint}"):
        dataset(
            [{"input": TWO_TURNS, "tools": tools}],
            build_tokenizer(PLAIN_CHAT),
            apply_chat_template=True,
        )


# ---- dropped rows


def test_dropped_rows_are_counted_by_reason() -> None:
    rows = [
        {"input": "Q:", "output": "ok"},
        {"input": "", "output": "ok"},
        {"input": "Q:", "output": ""},
        {"input": "Q:", "output": ""},
        {"input": "abcdefgh", "output": "ok"},
        {"input": "abcdefg", "output": "x"},
    ]
    kept = dataset(rows, output_key="output", max_len=10)
    assert [show(row)[0] for row in (kept[0], kept[1])] == ["Q:", "abcdefg"]
    assert kept.summary == (
        "2 of 6 rows kept, dropped 1 with a prompt of 8 tokens or more (--data.max_len 10), "
        "1 with an empty prompt, 2 with an empty response."
    )


def test_chat_without_an_answer_is_dropped() -> None:
    rows = [
        {"input": [user("a")]},
        {"input": [user("a"), assistant("")]},
        {"input": TWO_TURNS},
        {"input": [assistant("x")]},
    ]
    kept = dataset(rows, build_tokenizer(PLAIN_CHAT), apply_chat_template=True)
    assert kept.summary == (
        "1 of 4 rows kept, dropped 1 with an empty prompt, 1 with an empty response, "
        "1 without a turn to train on."
    )


def test_error_reports_the_drop_counts_if_no_row_is_left() -> None:
    with pytest.raises(
        DataError, match=r"0 of 2 rows kept, dropped 2 with an empty response.*--data\.output_key"
    ):
        dataset([{"input": "a", "output": ""}, {"input": "b", "output": ""}], output_key="output")


def test_error_for_a_missing_answer_column_names_the_columns_and_the_flag() -> None:
    with pytest.raises(DataError, match=r"'input', 'reply'.*--data\.output_key"):
        dataset([{"input": "a", "reply": "b"}])


def test_sft_error_for_preference_pairs_names_the_answer_column_and_the_dpo_command() -> None:
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    with pytest.raises(
        DataError, match=r"'prompt', 'chosen', 'rejected'.*--data\.output_key chosen.*openrlhf dpo"
    ):
        dataset([pair], input_key="prompt")


# ---- malformed rows and missing columns


def test_error_for_a_missing_column_lists_the_available_columns() -> None:
    with pytest.raises(
        DataError,
        match=r"no column 'prompt', which --data\.input_key names\. It has 'input', 'output'",
    ):
        dataset([{"input": "a", "output": "b"}], input_key="prompt")


@pytest.mark.parametrize("header", [" Prompt", "Prompt ", "PROMPT"])
def test_error_for_a_column_that_differs_in_spaces_or_capitals_suggests_the_flag(
    header: str,
) -> None:
    with pytest.raises(DataError) as caught:
        dataset([{header: "a", "output": "b"}], input_key="prompt", output_key="output")
    assert f"--data.input_key {shlex.quote(header)}" in str(caught.value)


@pytest.mark.parametrize("rest", [{}, {"version": "1.1"}])
def test_error_for_rows_nested_under_a_json_key_suggests_a_separate_file(
    tmp_path: Path, rest: Any
) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({**rest, "data": [{"input": "a", "output": "b"}] * 3}))
    rows = load_datasets(str(path), split="train", max_samples=10, seed=0)
    with pytest.raises(DataError, match=r"rows\.json has no column 'input'.*'data'.*only row"):
        SFTDataset(rows, build_tokenizer(), SFTDataConfig(max_len=64, output_key="output"))


def test_error_for_a_malformed_row_names_the_dataset_the_row_and_the_column(tmp_path: Any) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(json.dumps({"input": "a", "output": value}) + "\n" for value in ("x", "y", None))
    )
    rows = load_datasets(str(path), split="train", max_samples=10, seed=0)
    with pytest.raises(
        DataError, match=r"rows\.jsonl, row 3, column 'output': is null, not a string"
    ):
        SFTDataset(rows, build_tokenizer(), SFTDataConfig(max_len=64, output_key="output"))


def test_error_for_chat_messages_without_a_template_names_the_missing_flag() -> None:
    with pytest.raises(DataError, match=r"column 'input': is a list.*--data\.apply_chat_template"):
        dataset([{"input": TWO_TURNS}], output_key="input")


def test_error_for_a_malformed_message_names_the_row_and_the_message() -> None:
    rows = [{"input": [{"speaker": "human", "value": "a"}]}]
    with pytest.raises(
        DataError, match=r"row 1, column 'input': message 0 needs 'role'.*--data\.input_key"
    ):
        dataset(rows, build_tokenizer(PLAIN_CHAT), apply_chat_template=True)


def test_error_names_the_row_that_the_template_rejects() -> None:
    picky = "{% if messages|length > 2 %}{{ raise_exception('too many') }}{% endif %}" + PLAIN_CHAT
    with pytest.raises(
        DataError,
        match="row 2, column 'input': the chat template cannot render these messages: too many",
    ):
        dataset(
            [{"input": TWO_TURNS[:2]}, {"input": TWO_TURNS}],
            build_tokenizer(picky),
            apply_chat_template=True,
        )


def test_missing_chat_template_is_reported_before_any_row_is_read() -> None:
    with pytest.raises(DataError, match=r"--data\.tokenizer_chat_template"):
        dataset([{"input": TWO_TURNS}], apply_chat_template=True)


# ---- real data and large datasets


def test_rows_do_not_depend_on_the_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"input": f"{number}:", "output": "ok"} for number in range(40)]
    alone = dataset(rows, output_key="output")
    monkeypatch.setattr("openrlhf.data.rows.MANY_ROWS", 20)
    assert [row for row in map(dataset(rows, output_key="output").__getitem__, range(40))] == list(
        map(alone.__getitem__, range(40))
    )


def test_gsm8k_is_read_as_chat_messages() -> None:
    lines = [json.loads(line) for line in gsm8k().read_text().splitlines()[:200]]
    rows = [{"messages": [user(line["question"]), assistant(line["answer"])]} for line in lines]
    tokenizer = build_tokenizer(PLAIN_CHAT, eos="<|end|>")
    ready = dataset(
        rows,
        tokenizer,
        max_len=4096,
        input_key="messages",
        apply_chat_template=True,
        multiturn=True,
    )
    assert len(ready) == 200
    for place, line in enumerate(lines):
        row = ready[place]
        learned = [token for token, on in zip(row.tokens, row.loss_mask, strict=True) if on]
        ascii_answer = "".join(letter if letter.isascii() else "<unk>" for letter in line["answer"])
        assert "".join(tokenizer.convert_ids_to_tokens(learned)) == ascii_answer + "<|end|>"
