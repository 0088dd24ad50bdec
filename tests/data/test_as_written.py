"""Rows are read unchanged from every file format.

Text is not converted, and numbers, nulls and nested values are preserved.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from openrlhf.config.flags import amend
from openrlhf.config.learning import RLDataConfig
from openrlhf.config.supervised import DPOConfig, KTOConfig, SFTConfig, SFTDataConfig
from openrlhf.data.errors import DataError
from openrlhf.data.feedback import LabelledDataset, PreferenceDataset
from openrlhf.data.layouts import recognise
from openrlhf.data.loading import load_datasets
from openrlhf.data.prompts import PromptDataset
from openrlhf.data.sft import SFTDataset
from openrlhf.data.text_files import csv_records, json_rows
from tests.data.small import build_tokenizer, json_lines

Rows = list[dict[str, Any]]
# A template that renders an entire chat as JSON.
AS_JSON = "{{ tools | tojson }}{% for message in messages %}{{ message | tojson }}{% endfor %}"


def test_error_for_broken_json_gives_the_line_column_and_reason(tmp_path: Path) -> None:
    file = tmp_path / "broken.jsonl"
    file.write_text('{"input": "a"}\n{"input": "a\tb"}\n{"input": "c"}\n')
    expected = r"line 2: .*column 13: .*control character\."
    with pytest.raises(DataError, match=expected) as caught:
        load_datasets(str(file), split="train", max_samples=10, seed=0)
    assert "at, at" not in str(caught.value)


# ---- arbitrary texts and values in CSV and JSON files

CELL = st.text(st.characters(exclude_categories=["Cs"]))
CELLS = st.integers(1, 4).flatmap(
    lambda width: st.lists(st.lists(CELL, min_size=width, max_size=width), max_size=5)
)
NUMBER = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
JSON_VALUE = st.recursive(
    st.none() | st.booleans() | NUMBER | CELL,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(CELL, inner, max_size=3),
    max_leaves=6,
)
JSON_ROWS = st.lists(
    st.dictionaries(st.sampled_from("abcd"), JSON_VALUE, min_size=1), min_size=1, max_size=5
)
FORMS: dict[str, Callable[[Rows], str]] = {
    "lines": json_lines,
    "array": json.dumps,
    "indented array": lambda rows: json.dumps(rows, indent=1, ensure_ascii=False),
    "indented objects": lambda rows: "\n".join(json.dumps(row, indent=1) for row in rows),
}


def csv_text(records: list[list[str]], **style: Any) -> str:
    text = io.StringIO(newline="")
    csv.writer(text, **style).writerows(records)
    return text.getvalue()


@given(
    CELLS,
    st.sampled_from(",;\t"),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.booleans(),
    st.booleans(),
)
def test_every_csv_cell_is_read_exactly_as_written(
    cells: list[list[str]], separator: str, end: str, quoted: bool, marked: bool
) -> None:
    header = ["a", "b", "c", "d"][: len(cells[0])] if cells else ["a", "b"]
    if len(header) == 1:
        separator = ","  # no separator can be detected in a file with a single column
    # Python's csv writer leaves line breaks unquoted unless they equal the line terminator.
    # A reader would start a new row at an unquoted line break.
    quoted = quoted or any(sign in "".join(row) for row in cells for sign in "\r\n")
    style = {
        "delimiter": separator,
        "lineterminator": end,
        "quoting": csv.QUOTE_ALL if quoted else csv.QUOTE_MINIMAL,
    }
    text = "\ufeff" * marked + csv_text([header, *cells], **style)
    read = csv_records(io.BytesIO(text.encode()), "x.csv", ",")
    assert [fields for _, fields in read] == [header, *cells]


@given(JSON_ROWS, st.sampled_from(sorted(FORMS)))
def test_every_json_value_is_read_exactly_as_written(rows: Rows, form: str) -> None:
    read = list(json_rows(io.BytesIO(FORMS[form](rows).encode()), "x.json"))
    assert json.dumps(read) == json.dumps(rows)  # compare text: in Python, 1 == 1.0 == True


def check_loaded_json(folder: Path, rows: Rows, form: str) -> None:
    path = folder / "x.json.gz"
    path.write_bytes(gzip.compress(FORMS[form](rows).encode()))
    columns = sorted({column for row in rows for column in row})
    loaded = load_datasets(str(path), split="train", max_samples=100, seed=0).select_columns(
        columns
    )
    expected = [{column: row.get(column) for column in columns} for row in rows]
    assert json.dumps(list(loaded), sort_keys=True) == json.dumps(expected, sort_keys=True)


@settings(
    max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(JSON_ROWS, st.sampled_from(sorted(FORMS)))
def test_rows_of_a_json_file_load_unchanged(tmp_path: Path, rows: Rows, form: str) -> None:
    check_loaded_json(tmp_path, rows, form)


@pytest.mark.verify
@settings(
    max_examples=500, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(JSON_ROWS, st.sampled_from(sorted(FORMS)))
def test_rows_of_many_json_files_load_unchanged(tmp_path: Path, rows: Rows, form: str) -> None:
    check_loaded_json(tmp_path, rows, form)


@pytest.mark.parametrize(
    "values",
    [
        [1, 2.5],
        [1, "1", True, None],
        ["a"] * 1500 + [7],
        [1] * 1500 + [0.5],
        ["2024-05-06", "2024-05-07"],
        [{"day": "2024-05-06"}, {"day": "2024-05-07", "at": None}],
        [[1, 2], [0.1, None]],
        [["a"], [{"b": None}]],
        [10**30, 0.12345678901234568, 1.7976931348623157e308],
        [None, None],
        [[], None],
    ],
    ids=repr,
)
def test_values_of_mixed_types_in_one_column_are_unchanged(
    values: list[Any], tmp_path: Path
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json_lines([{"label": value} for value in values]))
    for _ in ("the file", "the cache"):
        loaded = load_datasets(str(path), split="train", max_samples=10**4, seed=0)
        assert json.dumps(loaded["label"][:]) == json.dumps(values)


def test_nan_is_read_as_nan(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"a": NaN, "b": [NaN, "x"]}\n')
    [row] = load_datasets(str(tmp_path / "x.jsonl"), split="train", max_samples=9, seed=0)
    assert math.isnan(row["a"]) and math.isnan(row["b"][0])


# ---- the same rows in every format


def write_rows(folder: Path, rows: Rows, form: str) -> str:
    """Write rows in a file format and return the dataset spec."""
    path = folder / f"x.{form}"
    header = [*rows[0]]
    match form:
        case "csv":
            path.write_text(csv_text([header, *([*row.values()] for row in rows)]), newline="")
        case "tsv":
            path.write_text(
                csv_text([header, *([*row.values()] for row in rows)], delimiter="\t"), newline=""
            )
        case "json":
            path.write_text(json.dumps(rows))
        case "jsonl":
            path.write_text(json_lines(rows))
        case "parquet":
            Dataset.from_list(rows).to_parquet(path)
        case "saved":
            Dataset.from_list(rows).save_to_disk(path)
        case _:  # a folder with two files
            path.mkdir()
            (path / "a.jsonl").write_text(json_lines(rows[:1]))
            (path / "b.jsonl").write_text(json_lines(rows[1:]))
    return str(path)


TEXTS = [
    "00109",
    "1.50",
    "True",
    "NA",
    "None",
    "null",
    "a,b",
    '"q"',
    "x\ny\r\nz",
    "1e5",
    " lead",
    "2024-05-06",
    "{}",
]
FORMATS = ["csv", "tsv", "json", "jsonl", "parquet", "saved", "folder"]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    "columns", [("input", "output"), ("question", "answer"), ("instruction", "output")]
)
def test_training_texts_are_unchanged(columns: tuple[str, str], form: str, tmp_path: Path) -> None:
    asked, answered = columns
    rows = [{asked: text, answered: text} for text in TEXTS]
    loaded = load_datasets(write_rows(tmp_path, rows, form), split="train", max_samples=100, seed=0)
    config = amend(SFTConfig(), {"data.input_template": "{}", "given": {}})
    tokenizer = build_tokenizer()
    trained = SFTDataset(loaded, tokenizer, recognise(loaded, config))
    expected = [list(tokenizer(f"{text}{text} <eos>")["input_ids"]) for text in TEXTS]
    assert [trained[number].tokens for number in range(len(trained))] == expected


@pytest.mark.parametrize("form", FORMATS)
def test_pairs_with_a_margin_are_read_unchanged(form: str, tmp_path: Path) -> None:
    rows = [{"prompt": "1", "chosen": text, "rejected": "-", "margin": "0.5"} for text in TEXTS]
    if form not in ("csv", "tsv"):
        rows = [{**row, "margin": 0.5} for row in rows]
    loaded = load_datasets(write_rows(tmp_path, rows, form), split="train", max_samples=100, seed=0)
    tokenizer = build_tokenizer()
    pairs = PreferenceDataset(
        loaded, tokenizer, recognise(loaded, amend(DPOConfig(), {"given": {}}))
    )
    read = [pairs[number] for number in range(len(pairs))]
    assert [pair.chosen for pair in read] == [
        list(tokenizer(f"1{text} <eos>")["input_ids"]) for text in TEXTS
    ]
    assert {pair.margin for pair in read} == {0.5}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("score", [1, True, "true"])
def test_kto_labels_are_read_from_every_file_format(score: Any, form: str, tmp_path: Path) -> None:
    rows = [{"instruction": "q", "response": text, "score": score} for text in TEXTS]
    config = amend(
        KTOConfig(), {"given": {}, "data.label_key": "score", "data.input_key": "instruction"}
    )
    config = amend(config, {"data.output_key": "response"})
    loaded = load_datasets(write_rows(tmp_path, rows, form), split="train", max_samples=100, seed=0)
    labelled = LabelledDataset(loaded, build_tokenizer(), recognise(loaded, config))
    assert [row.desirable for row in map(labelled.__getitem__, range(len(labelled)))] == [
        True
    ] * len(TEXTS)


def test_layout_with_a_score_column_is_detected_in_a_csv_file(tmp_path: Path) -> None:
    path = write_rows(tmp_path, [{"instruction": "q", "response": "a", "score": "0"}], "csv")
    loaded = load_datasets(path, split="train", max_samples=100, seed=0)
    assert recognise(loaded, amend(KTOConfig(), {"given": {}})).label_key == "score"


# ---- nulls and value types in chats


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def calling(**arguments: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "find", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def definition(**properties: Any) -> dict[str, Any]:
    function = {"name": "find", "parameters": {"type": "object", "properties": properties}}
    return {"type": "function", "function": function}


NULLS: Rows = [
    {
        "messages": [user("a"), calling(where=None, limit=None, day="2024-05-06"), user("b")],
        "tools": [
            definition(where={"type": ["string", "null"], "default": None, "enum": ["x", None]})
        ],
    },
    {
        "messages": [user("c"), calling(exact=0.12345678901234568, whole=1), user("b")],
        "tools": [definition(q={})],
    },
]
NO_NULLS: Rows = [
    {
        "messages": [user("a"), calling(where="x"), user("b")],
        "tools": [definition(where={"type": "string"})],
    },
    {
        "messages": [user("c"), calling(limit=3), user("b")],
        "tools": [definition(limit={"minimum": 1})],
    },
]


def prompts_of(spec: str) -> list[str]:
    """Return a dataset's prompts, which contain all messages and tools as JSON."""
    rows = load_datasets(spec, split="train", max_samples=100, seed=0)
    data = amend(
        RLDataConfig(input_key="messages"), {"apply_chat_template": True, "max_len": 10_000}
    )
    prompts = PromptDataset(rows, build_tokenizer(AS_JSON), data)
    return [prompts[number].text for number in range(len(prompts))]


def shown(rows: Rows) -> list[str]:
    return ["".join(map(json.dumps, [row["tools"], *row["messages"]])) for row in rows]


def same(a: list[str], b: list[str]) -> bool:
    """Compare two strings that contain several JSON values, ignoring the order of object keys."""

    def values(text: str) -> list[Any]:
        decoder, place, found = json.JSONDecoder(), 0, []
        while place < len(text):
            value, place = decoder.raw_decode(text, place)
            found.append(json.dumps(value, sort_keys=True))
        return found

    return [*map(values, a)] == [*map(values, b)]


@pytest.mark.parametrize("form", ["json", "jsonl", "folder"])
def test_nulls_in_tool_calls_and_schemas_reach_the_chat_template(form: str, tmp_path: Path) -> None:
    assert prompts_of(write_rows(tmp_path, NULLS, form)) == shown(NULLS)


def test_nulls_in_tools_and_arguments_given_as_json_text_reach_the_chat_template(
    tmp_path: Path,
) -> None:
    rows = json.loads(json.dumps(NULLS))
    for row in rows:
        row["tools"] = json.dumps(row["tools"])
        function = row["messages"][1]["tool_calls"][0]["function"]
        function["arguments"] = json.dumps(function["arguments"])
    for form in ("jsonl", "parquet"):
        assert same(prompts_of(write_rows(tmp_path, rows, form)), shown(NULLS))


@pytest.mark.parametrize("form", ["json", "jsonl", "folder", "parquet", "saved"])
def test_loading_adds_no_nulls_to_a_chat(form: str, tmp_path: Path) -> None:
    assert same(prompts_of(write_rows(tmp_path, NO_NULLS, form)), shown(NO_NULLS))


def test_files_of_different_formats_are_blended_without_changing_values(tmp_path: Path) -> None:
    one, other = write_rows(tmp_path, NULLS, "jsonl"), write_rows(tmp_path, NO_NULLS, "parquet")
    assert same(prompts_of(f"{one},{other}"), shown([*NULLS, *NO_NULLS]))
    assert same(prompts_of(f"{other},{one}"), shown([*NO_NULLS, *NULLS]))


def test_nulls_added_by_arrow_are_removed_from_labels_of_a_saved_dataset(tmp_path: Path) -> None:
    rows = [{"input": "a", "label": {"x": 1}}, {"input": "b", "label": {"y": [1]}}]
    for form in ("saved", "jsonl"):
        loaded = load_datasets(
            write_rows(tmp_path, rows, form), split="train", max_samples=100, seed=0
        )
        data = RLDataConfig(input_key="input", label_key="label", input_template=None)
        prompts = PromptDataset(loaded, build_tokenizer(), data)
        assert [prompts[number].label for number in range(2)] == [row["label"] for row in rows]


# ---- other mistakes


def test_columns_missing_from_one_file_of_a_folder_are_null(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("input,output\n1,2\n")
    (tmp_path / "b.csv").write_text("output,note\n3,4\n")
    rows = load_datasets(str(tmp_path), split="train", max_samples=100, seed=0)
    assert rows.select_columns(["input", "output", "note"])[:] == {
        "input": ["1", None],
        "output": ["2", "3"],
        "note": [None, "4"],
    }


@pytest.mark.parametrize("name", ["[1].csv", "a*b.csv", "a b?.csv"])
def test_file_name_may_contain_glob_characters(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("input\n1\n")
    (tmp_path / "axb.csv").write_text("input\n2\n")
    assert list(
        load_datasets(str(tmp_path / name), split="train", max_samples=9, seed=0)["input"]
    ) == ["1"]


def test_edited_file_is_reread_instead_of_loaded_from_cache(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    for answer in ("1", "02"):
        path.write_text(f"input\n{answer}\n")
        assert list(load_datasets(str(path), split="train", max_samples=9, seed=0)["input"]) == [
            answer
        ]


def test_empty_cell_in_a_training_column_raises_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("input,output\na,b\nc,\n")
    loaded = load_datasets(str(tmp_path / "x.csv"), split="train", max_samples=9, seed=0)
    with pytest.raises(DataError, match=r"x\.csv, row 2, column 'output'"):
        SFTDataset(loaded, build_tokenizer(), SFTDataConfig(output_key="output"))


def test_csv_column_without_values_is_read_as_text(tmp_path: Path) -> None:
    (tmp_path / "empty.csv").write_text("input,output,note\na,b,\nc,d,\n")
    rows = load_datasets(str(tmp_path / "empty.csv"), split="train", max_samples=9, seed=0)
    assert rows.features["note"].dtype == "string"
    assert rows[0]["note"] is None
