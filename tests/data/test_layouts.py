"""Column layouts of public datasets.

Each layout is detected from its columns, reported in a notice, and read with its flags.
"""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from datasets import Dataset

from openrlhf.config import choices
from openrlhf.config.evaluation import EvaluationConfig
from openrlhf.config.flags import amend
from openrlhf.config.learning import RLDataConfig
from openrlhf.config.supervised import (
    DPOConfig,
    KDConfig,
    KTOConfig,
    PRMConfig,
    RMConfig,
    SFTConfig,
)
from openrlhf.data.errors import DataError
from openrlhf.data.feedback import LabelledDataset, PreferenceDataset
from openrlhf.data.layouts import LAYOUTS, READERS, flags_of, recognise
from openrlhf.data.prompts import PromptDataset
from openrlhf.data.sft import SFTDataset
from tests.data.small import PLAIN_CHAT, build_tokenizer
from tests.sources import ROOT

Rows = list[dict[str, Any]]
ROOTS: dict[str, Any] = {
    "sft": SFTConfig,
    "kd": KDConfig,
    "dpo": DPOConfig,
    "rm": RMConfig,
    "kto": KTOConfig,
    "prm": PRMConfig,
}
CHAT = "--data.apply_chat_template"
Q, A, B = (
    {"role": role, "content": text}
    for role, text in (("user", "q"), ("assistant", "ok"), ("assistant", "no"))
)
SHAREGPT = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "ok"}]


def config(task: str, **given: Any) -> Any:
    """Return a task's config in which the user has set the given flags."""
    paths = {f"data.{flag}": value for flag, value in given.items()}
    return amend(ROOTS[task](), {"data.max_len": 64, "given": paths, **paths})


def recognised(
    row: dict[str, Any], task: str, capsys: pytest.CaptureFixture[str], **given: Any
) -> tuple[Any, str]:
    """Return the `data` section detected for a one-row dataset, and the flags in the notice."""
    data = recognise(Dataset.from_list([row]), config(task, **given))
    return data, (
        re.findall(r"layout: (--data\..*)\. .*--data\.layout columns", capsys.readouterr().err)
        or [""]
    )[0]


PAIRS: list[tuple[dict[str, Any], str]] = [
    ({"chosen": [Q, A], "rejected": [Q, B]}, CHAT),
    ({"prompt": "q", "chosen": "ok", "rejected": "no"}, "--data.prompt_key prompt"),
    ({"prompt": [Q], "chosen": [A], "rejected": [B]}, f"{CHAT} --data.prompt_key prompt"),
    ({"prompt": "q", "chosen": [A], "rejected": [B]}, f"{CHAT} --data.prompt_key prompt"),
    ({"prompt": "q", "chosen": [Q, A], "rejected": [Q, B]}, CHAT),  # the answers repeat the prompt
    (
        {
            "conversations": SHAREGPT[:1],
            "chosen": SHAREGPT[1],
            "rejected": {"from": "gpt", "value": "no"},
        },
        f"{CHAT} --data.prompt_key conversations",
    ),
    (
        {
            "conversations": SHAREGPT[:1],
            "chosen": SHAREGPT[1],
            "rejected": {"from": "gpt", "value": "no"},
            "system": None,
        },
        f"--data.layout chat {CHAT} --data.prompt_key conversations",
    ),
    (
        {"winner": "model_b", "conversation_a": [Q, B], "conversation_b": [Q, A]},
        f"--data.layout arena {CHAT}",
    ),
    (
        {
            "question": {"full_text": "q"},
            "answer_0": "no",
            "answer_1": "ok",
            "score_0": -1.0,
            "score_1": 1.0,
        },
        "--data.layout webgpt --data.prompt_key prompt",
    ),
    (
        {"instruction": "q", "input": "", "chosen": "ok", "rejected": "no"},
        "--data.layout alpaca --data.prompt_key instruction",
    ),
    (
        {"question": "q", "chosen": "ok", "rejected": "no"},
        "--data.layout orca --data.prompt_key question",
    ),
]


@pytest.mark.parametrize("task", ["rm", "dpo", "kto"])
@pytest.mark.parametrize(("row", "flags"), PAIRS)
def test_pair_layouts_are_detected_and_read(
    row: dict[str, Any], flags: str, task: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data, said = recognised(row, task, capsys)
    assert said == flags
    tokenizer = build_tokenizer(PLAIN_CHAT, eos="<|end|>")
    pair = PreferenceDataset(Dataset.from_list([row]), tokenizer, data, needs_prompt=True)[0]
    texts = (
        "".join(tokenizer.convert_ids_to_tokens(tokens)) for tokens in (pair.chosen, pair.rejected)
    )
    turns = "<|user|>q<|end|>\n<|assistant|>{}<|end|>" if CHAT in flags else "q{} <|end|>"
    if task == "kto" and CHAT not in flags:
        turns = "User: q\nAssistant: {} <|end|>"
    assert list(texts) == [turns.format("ok"), turns.format("no")]
    assert pair.prompt_length > 0


TEXTS: list[tuple[dict[str, Any], str]] = [
    ({"messages": [Q, A]}, f"{CHAT} --data.input_key messages"),
    ({"messages": [Q, A], "system": ""}, f"--data.layout chat {CHAT} --data.input_key messages"),
    ({"conversations": SHAREGPT}, f"{CHAT} --data.input_key conversations"),
    (
        {"conversations": SHAREGPT, "system": None},
        f"--data.layout chat {CHAT} --data.input_key conversations",
    ),
    (
        {"prompt": [Q], "completion": [A]},
        f"{CHAT} --data.input_key prompt --data.output_key completion",
    ),
    ({"prompt": "q", "completion": "ok"}, "--data.input_key prompt --data.output_key completion"),
    ({"prompt": "q", "response": "ok"}, "--data.input_key prompt --data.output_key response"),
    ({"question": "q", "answer": "ok"}, "--data.input_key question --data.output_key answer"),
    ({"input": "q", "output": "ok"}, "--data.output_key output"),
    (
        {"instruction": "q", "input": "", "output": "ok"},
        "--data.layout alpaca --data.input_key instruction --data.output_key output",
    ),
    (
        {"question": "q", "response": "ok"},
        "--data.layout orca --data.input_key question --data.output_key response",
    ),
]


@pytest.mark.parametrize(("row", "flags"), TEXTS)
def test_supervised_layouts_are_detected_and_read(
    row: dict[str, Any], flags: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data, said = recognised(row, "sft", capsys)
    assert said == flags
    tokenizer = build_tokenizer(PLAIN_CHAT, eos="<|end|>")
    tokens = SFTDataset(Dataset.from_list([row]), tokenizer, data)[0].tokens
    text = (
        "<|user|>q<|end|>\n<|assistant|>ok<|end|>"
        if CHAT in flags
        else "User: q\nAssistant: ok <|end|>"
    )
    assert "".join(tokenizer.convert_ids_to_tokens(tokens)) == text
    # KTO rows with the same texts have the same tokens.
    labelled = {**row, "label": 1}
    data, _ = recognised(labelled, "kto", capsys)
    assert LabelledDataset(Dataset.from_list([labelled]), tokenizer, data)[0].tokens == tokens


def test_rows_with_a_column_named_dropped_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    """Layouts with a reader read all columns of a row."""
    row = {"instruction": "q", "chosen": "a", "rejected": "b", "dropped": None}
    data, said = recognised(row, "rm", capsys)
    assert "--data.layout alpaca" in said
    assert len(PreferenceDataset(Dataset.from_list([row]), build_tokenizer(), data)) == 1


def test_score_column_becomes_the_label(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"instruction": "q", "response": "ok", "score": score} for score in (1, 0)]
    data, said = recognised(rows[0], "kto", capsys)
    assert said.endswith("--data.label_key score")
    labelled = LabelledDataset(Dataset.from_list(rows), build_tokenizer(), data)
    assert [labelled[place].desirable for place in (0, 1)] == [True, False]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [Q, A]},
        {"conversations": SHAREGPT},
        {"prompt": [Q]},
        {"prompt": [Q], "completion": [A]},
    ],
)
def test_rl_prompts_end_before_the_answer(row: dict[str, Any]) -> None:
    sections = amend(config("sft"), {"data": RLDataConfig()})
    rows = Dataset.from_list([row])
    prompt = PromptDataset(rows, build_tokenizer(PLAIN_CHAT), recognise(rows, sections, "text"))[0]
    assert prompt.text == "<|user|>q<|end|>\n<|assistant|>"


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ("label_key", "--data.input_key question --data.label_key answer"),
        ("output_key", "--data.input_key question"),
    ],
)
def test_answer_column_is_detected_as_the_label_of_rl_prompts(
    answers: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = Dataset.from_list([{"question": "2 + 2?", "answer": "4"}])
    data = recognise(rows, EvaluationConfig(), "text", answers=answers)
    assert (data.input_key, data.label_key) == (
        "question",
        "answer" if answers == "label_key" else None,
    )
    assert f"layout: {said}. " in capsys.readouterr().err


def test_alpaca_prompt_contains_input_system_and_history(
    capsys: pytest.CaptureFixture[str],
) -> None:
    row = {"instruction": "do", "input": "it", "output": "ok", "system": "", "history": None}
    full = {**row, "system": "s", "history": [["a", "b"]]}
    tokenizer = build_tokenizer(PLAIN_CHAT, eos="<|end|>")
    data, _ = recognised(row, "sft", capsys)

    def text(rows: Rows, **more: Any) -> str:
        tokens = SFTDataset(Dataset.from_list(rows), tokenizer, amend(data, more))[0].tokens
        return "".join(tokenizer.convert_ids_to_tokens(tokens))

    assert text([row]) == "User: do\nit\nAssistant: ok <|end|>"
    assert text([full], apply_chat_template=True) == (
        "<|system|>s<|end|>\n"
        "<|user|>a<|end|>\n"
        "<|assistant|>b<|end|>\n"
        "<|user|>do\n"
        "it<|end|>\n"
        "<|assistant|>ok<|end|>"
    )
    with pytest.raises(
        DataError, match=r"row 1, column 'instruction': is a list.*--data\.apply_chat_template"
    ):
        text([full])
    with pytest.raises(
        DataError, match=r"row 1, column 'history': has \['a'\], .*\[question, answer\]"
    ):
        text([{**row, "history": [["a"]]}])


@pytest.mark.parametrize("column", ["messages", "conversations"])
def test_system_prompt_in_its_own_column_becomes_the_first_turn(
    column: str, capsys: pytest.CaptureFixture[str]
) -> None:
    system = {"role": "system", "content": "s"}
    rows = [
        {column: turns, "system": text}
        for turns, text in (
            ([Q, A], None),
            ([Q, A], "s"),
            ([system, Q, A], "s\n"),
            ([system, Q, A], ""),
        )
    ]
    data, said = recognised(rows[0], "sft", capsys)
    assert said == f"--data.layout chat {CHAT} --data.input_key {column}"
    tokenizer = build_tokenizer(PLAIN_CHAT, eos="<|end|>")
    read = SFTDataset(Dataset.from_list(rows), tokenizer, data)
    texts = ["".join(tokenizer.convert_ids_to_tokens(row.tokens)) for row in read]  # pyright: ignore
    turns = "<|user|>q<|end|>\n<|assistant|>ok<|end|>"
    assert texts == [turns, *[f"<|system|>s<|end|>\n{turns}"] * 3]
    given = config("sft", input_key=column, apply_chat_template=True)
    assert recognise(Dataset.from_list(rows), given) is given.data
    assert re.search(r": --data\.layout chat\. .*--data\.\*_key", capsys.readouterr().err)


# ---- prompt columns that the answers may repeat

GREETING = {"prompt": "hi", "chosen": "hi there, how are you?", "rejected": "go away."}
PLAIN = {"prompt": "q", "chosen": "q ok", "rejected": "q no"}
NOT_READ = "The column 'prompt' is not read"


@pytest.mark.parametrize("task", ["rm", "dpo", "kto"])
@pytest.mark.parametrize("first", [0, 1])
def test_prompt_column_is_used_if_only_some_answers_contain_the_prompt(
    first: int, task: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The row whose answers contain the prompt may come first or second."""
    rows = [{"prompt": "2+2", "chosen": "4", "rejected": "5"}, GREETING]
    data = recognise(Dataset.from_list([rows[first], rows[1 - first]]), config(task))
    assert data.prompt_key == "prompt" and NOT_READ not in capsys.readouterr().err
    # In one of the rows, both answers happen to begin with the prompt.
    alike = Dataset.from_list([{"prompt": "hi", "chosen": "hi!", "rejected": "him?"}, rows[0]])
    assert recognise(alike, config(task)).prompt_key == "prompt"
    capsys.readouterr()
    spoken = {
        "prompt": "hi",
        "chosen": [{**A, "content": "hi there"}],
        "rejected": [{**A, "content": "go away"}],
    }
    for prompt in ("hi", [{**Q, "content": "hi"}]):
        data, said = recognised({**spoken, "prompt": prompt}, task, capsys)
        assert said == f"{CHAT} --data.prompt_key prompt"
        assert data.prompt_key == "prompt"


@pytest.mark.parametrize("task", ["rm", "dpo", "kto"])
@pytest.mark.parametrize(
    "row",
    [
        PLAIN,
        {"prompt": "q\n", "chosen": "q\nok", "rejected": "q\nno"},
        {
            "prompt": "q?",
            "chosen": "Question: q? Answer: ok",
            "rejected": "Question: q? Answer: no",
        },
        {"prompt": "", "chosen": [Q, A], "rejected": [Q, B]},
        {"prompt": "q", "chosen": [Q, A], "rejected": [Q, B]},
        {"prompt": [Q], "chosen": [Q, A], "rejected": [Q, B]},
        {"prompt": [Q, A, Q], "chosen": [Q, A, Q, A], "rejected": [Q, A, Q, B]},
    ],
)
def test_prompt_column_whose_text_the_answers_repeat_is_ignored_with_a_notice(
    row: dict[str, Any], task: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = recognise(Dataset.from_list([row] * 3), config(task))
    said = capsys.readouterr().err
    assert data.prompt_key is None and NOT_READ in said
    assert data.apply_chat_template == isinstance(row["chosen"], list)
    for given in ({"prompt_key": "prompt"}, {"layout": "columns"}):
        assert recognise(Dataset.from_list([row]), config(task, **given)).prompt_key == given.get(
            "prompt_key"
        )
        assert NOT_READ not in capsys.readouterr().err


@pytest.mark.parametrize("prompt", ["", 12])
def test_empty_prompts_do_not_count_as_repeated(
    prompt: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Later rows may have a prompt.

    A prompt that is a number causes an error that names the row.
    """
    row = {"prompt": prompt, "chosen": "12 a", "rejected": "12 b"}
    data = recognise(Dataset.from_list([row] * 3), config("dpo"))
    assert data.prompt_key == "prompt" and NOT_READ not in capsys.readouterr().err


def test_rl_prompts_are_read_from_the_prompt_column_of_pairs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = recognise(
        Dataset.from_list([PLAIN]), amend(config("sft"), {"data": RLDataConfig()}), "text"
    )
    assert data.input_key == "prompt" and NOT_READ not in capsys.readouterr().err


def test_tied_comparisons_are_dropped_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    winners = ["tie", "model_b", "tie (bothbad)"]
    rows = [
        {"winner": winner, "conversation_a": [Q, B], "conversation_b": [Q, A]} for winner in winners
    ]
    data, _ = recognised(rows[0], "rm", capsys)
    tokenizer = build_tokenizer(PLAIN_CHAT, eos="<|end|>")
    pairs = PreferenceDataset(Dataset.from_list(rows), tokenizer, data)
    assert pairs.summary == "1 of 3 pairs kept, dropped 2 that are ties."
    row = next(row for row, _ in PAIRS if "score_0" in row)
    data, _ = recognised(row, "rm", capsys)
    with pytest.raises(DataError, match="row 2, column 'score_1': is None, not a finite number"):
        PreferenceDataset(Dataset.from_list([row, {**row, "score_1": None}]), tokenizer, data)


@pytest.mark.parametrize("winner", ["A", "model_a_v2", "model_c", "", 1, None])
def test_unknown_winner_raises_an_error(winner: Any, capsys: pytest.CaptureFixture[str]) -> None:
    sides = {"conversation_a": [Q, B], "conversation_b": [Q, A]}
    data, _ = recognised({"winner": "model_a", **sides}, "rm", capsys)
    rows = Dataset.from_list([{"winner": winner, **sides}])
    with pytest.raises(DataError, match=f"row 1, column 'winner': is {winner!r}"):
        PreferenceDataset(rows, build_tokenizer(PLAIN_CHAT, eos="<|end|>"), data)


@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_nonfinite_score_raises_an_error(score: float, capsys: pytest.CaptureFixture[str]) -> None:
    row = next(row for row, _ in PAIRS if "score_0" in row)
    data, _ = recognised(row, "rm", capsys)
    rows = Dataset.from_list([{**row, "score_1": score}])
    with pytest.raises(DataError, match=f"row 1, column 'score_1': is {score}"):
        PreferenceDataset(rows, build_tokenizer(PLAIN_CHAT, eos="<|end|>"), data)


# ---- user flags take precedence


def test_user_column_flags_are_kept_and_a_notice_names_the_detected_layout(
    capsys: pytest.CaptureFixture[str],
) -> None:
    row = {"instruction": "q", "input": "x", "output": "ok"}
    given = config("sft", input_key="instruction", output_key="output")
    assert recognise(Dataset.from_list([row]), given) is given.data
    assert re.search(r": --data\.layout alpaca\. .*--data\.\*_key", capsys.readouterr().err)
    other = config("sft", input_key="input", output_key="output")
    assert recognise(Dataset.from_list([row]), other) is other.data
    whole = config("rm", chosen_key="chosen", rejected_key="rejected", apply_chat_template=True)
    assert recognise(Dataset.from_list([PAIRS[0][0]]), whole) is whole.data
    assert capsys.readouterr().err == ""


def test_layout_can_be_set_explicitly_or_detection_disabled(
    capsys: pytest.CaptureFixture[str],
) -> None:
    row = {"instruction": "q", "output": "ok", "messages": [Q, A]}
    data, _ = recognised(row, "sft", capsys, layout="alpaca")
    assert (data.input_key, data.output_key, data.layout) == ("instruction", "output", "alpaca")
    data, said = recognised(row, "sft", capsys, layout="columns")
    assert (data.input_key, data.output_key, said) == ("input", None, "")
    with pytest.raises(DataError, match=r"--data\.layout orca .*'instruction'.* --data\.\*_key"):
        recognised(row, "sft", capsys, layout="orca")
    with pytest.raises(DataError, match=r"--data\.layout alpaca .*'instruction'"):
        recognised(row, "sft", capsys, layout="alpaca", input_key="messages")


def test_layouts_unsupported_by_a_command_are_not_detected(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for task, row in (
        ("prm", {"messages": [Q, A]}),
        ("rm", {"messages": [Q, A]}),
        ("sft", {"other": "a"}),
    ):
        data, said = recognised(row, task, capsys)
        assert (data, said) == (config(task).data, "")
    pretraining = SFTConfig(model=amend(SFTConfig().model, {"pretrain_mode_enable": True}))
    assert pretraining.derived_values()["data.layout"] == "columns"


def test_layout_resets_default_columns_that_it_does_not_use(
    capsys: pytest.CaptureFixture[str],
) -> None:
    data, _ = recognised({"messages": [Q, A]}, "kd", capsys)
    assert config("kd").data.output_key == "output"
    assert data.output_key is None


def test_layout_table_lists_the_flag_choices_and_only_existing_flags() -> None:
    entries = [flags_of(kind, entry) for kind, group in LAYOUTS.items() for entry in group]
    assert {*READERS, "auto", "columns"} == set(choices.LAYOUTS)
    assert {flags["layout"] for flags in entries if "layout" in flags} == set(READERS)
    known = {name for root in ROOTS.values() for name in vars(root().data)}
    assert {flag for flags in entries for flag in flags} <= known


def test_data_page_documents_every_layout_with_its_flags() -> None:
    lines = (ROOT / "docs/data.md").read_text().splitlines()
    for kind, entries in LAYOUTS.items():
        for entry in entries:
            flags = {
                f: v
                for f, v in flags_of(kind, entry).items()
                if v and (kind == "text" or f not in ("chosen_key", "rejected_key"))
            }
            words = {
                f"--data.{flag}" + ("" if value is True else f" {value}")
                for flag, value in flags.items()
            }
            assert any(
                words
                == set(
                    re.findall(r"--data\.\w+(?: \w+)?", line.rpartition("|")[0].rpartition("|")[2])
                )
                for line in lines
            ), words
