"""Every way to name a dataset works, and every way to get it wrong is answered with what to do."""

from __future__ import annotations

import csv
import gzip
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict, Features, Value

from openrlhf.data.errors import ROW, SOURCE, DataError
from openrlhf.data.loading import load_datasets
from openrlhf.data.rows import map_rows
from tests.data.small import json_lines

ROWS = [{"input": "a", "label": "1"}, {"input": "b", "label": "2"}, {"input": "c", "label": "3"}]
Write = Callable[[str, str], str]


def load(spec: str, **flags: Any) -> Dataset:
    return load_datasets(spec, **{"split": "train", "max_samples": 1000, "seed": 0} | flags)


def inputs(dataset: Dataset) -> list[str]:
    return list(dataset["input"])


# ---- formats


def save(path: Path) -> str:
    """ROWS in the format of the file's extension."""
    rows = Dataset.from_list(ROWS)
    opener = gzip.open if path.suffix == ".gz" else open
    match path.name.removesuffix(".gz").rsplit(".", 1)[1]:
        case "json":
            with opener(path, "wt") as file:
                file.write(f"[{','.join(json_lines(ROWS).splitlines())}]")
        case "jsonl":
            with opener(path, "wt") as file:
                file.write(json_lines(ROWS))
        case "csv":
            with opener(path, "wt") as file:
                writer = csv.DictWriter(file, ["input", "label"])
                writer.writeheader()
                writer.writerows(ROWS)
        case "parquet":
            rows.to_parquet(path)
        case "arrow":
            rows.save_to_disk(path.parent / "arrow")
            (path.parent / "arrow" / "data-00000-of-00001.arrow").rename(path)
    return str(path)


NAMES = ["x.json", "x.jsonl", "x.csv", "x.parquet", "x.arrow", "x.json.gz", "x.jsonl.gz", "x.csv.gz", "x.v1.JSONL"]


@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_each_format_is_read(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    saved = save(path if name != "x.v1.JSONL" else tmp_path / "x.jsonl")
    if name == "x.v1.JSONL":
        saved = str(Path(saved).rename(path))
    rows = load(saved)
    assert inputs(rows) == ["a", "b", "c"]
    assert [str(label) for label in rows["label"]] == ["1", "2", "3"]


def test_the_rows_of_a_file_belong_to_every_split(write: Write, tmp_path: Path) -> None:
    write("held_out.jsonl", json_lines(ROWS))
    assert inputs(load(str(tmp_path / "held_out.jsonl"), split="test")) == ["a", "b", "c"]


def test_a_folder_of_files_is_read_by_its_split_names(write: Write, tmp_path: Path) -> None:
    write("data/train.jsonl", json_lines(ROWS))
    write("data/test.jsonl", json_lines(ROWS[:1]))
    assert len(load(str(tmp_path / "data"))) == 3
    assert len(load(str(tmp_path / "data"), split="test")) == 1


def test_a_folder_within_a_folder_is_named_after_an_at_sign(write: Write, tmp_path: Path) -> None:
    write("data/easy/train.jsonl", json_lines(ROWS[:1]))
    write("data/hard/train.jsonl", json_lines(ROWS))
    assert len(load(f"{tmp_path}/data@hard")) == 3


def test_a_saved_dataset_is_read(tmp_path: Path) -> None:
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    assert inputs(load(str(tmp_path / "saved"), split="anything")) == ["a", "b", "c"]


def test_a_split_of_a_saved_dictionary_of_datasets_is_read(tmp_path: Path) -> None:
    DatasetDict(train=Dataset.from_list(ROWS), test=Dataset.from_list(ROWS[:1])).save_to_disk(tmp_path / "saved")
    assert len(load(str(tmp_path / "saved"), split="test")) == 1
    assert len(load(f"{tmp_path}/saved@train")) == 3


def test_a_path_may_hold_an_at_sign(write: Write) -> None:
    assert len(load(write("a@b.jsonl", json_lines(ROWS)))) == 3


def test_strings_that_look_like_dates_stay_strings(write: Write) -> None:
    path = write("x.jsonl", json_lines([{"label": "2024-05-06"}, {"label": "2024-05-07 10:00:00"}]))
    assert list(load(path)["label"]) == ["2024-05-06", "2024-05-07 10:00:00"]


# ---- blending


@pytest.fixture
def two_files(write: Write) -> str:
    many = [{"input": f"x{number}"} for number in range(60)]
    few = [{"input": f"y{number}"} for number in range(20)]
    return f"{write('many.jsonl', json_lines(many))}, {write('few.jsonl', json_lines(few))}"


def test_without_probabilities_datasets_follow_each_other(two_files: str) -> None:
    names = inputs(load(two_files))
    assert names == [f"x{number}" for number in range(60)] + [f"y{number}" for number in range(20)]


def test_the_cap_holds_for_each_dataset_and_for_the_blend(two_files: str) -> None:
    assert inputs(load(two_files, max_samples=30)) == [f"x{number}" for number in range(30)]
    assert inputs(load(two_files, max_samples=65)) == [f"x{number}" for number in range(60)] + [
        f"y{number}" for number in range(5)
    ]


def test_with_probabilities_every_row_is_drawn_at_least_once_in_the_order_of_its_file(two_files: str) -> None:
    names = inputs(load(two_files, probs="0.5,0.5"))
    assert {*names} == {f"x{number}" for number in range(60)} | {f"y{number}" for number in range(20)}
    first_x = [name for name in dict.fromkeys(names) if name.startswith("x")]
    assert first_x == [f"x{number}" for number in range(60)]
    share = sum(name.startswith("x") for name in names) / len(names)
    assert 0.35 < share < 0.65


def test_the_order_of_a_blend_depends_on_the_seed_only(two_files: str) -> None:
    orders = [inputs(load(two_files, probs="0.5,0.5", seed=seed)) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]


def test_the_number_of_draws_follows_the_probabilities(two_files: str) -> None:
    names = inputs(load(two_files, probs="0.9,0.1"))
    assert 0.8 < sum(name.startswith("x") for name in names) / len(names) < 0.97


def test_rows_know_where_they_come_from(two_files: str) -> None:
    rows = load(two_files, probs="0.5,0.5").shuffle(seed=3)
    for row in rows.select(range(20)):
        assert f"{'many' if row['input'][0] == 'x' else 'few'}.jsonl" in row[SOURCE]
        assert row[ROW] == int(row["input"][1:]) + 1  # lines of a file count from 1


def test_csv_and_json_files_blend(write: Write) -> None:
    files = write("x.jsonl", json_lines([{"input": "a"}])), write("x.csv", "input\nb\n")
    assert inputs(load(",".join(files))) == ["a", "b"]


def test_columns_of_different_types_are_named_with_both_datasets(write: Write) -> None:
    texts = write("x.jsonl", json_lines([{"input": "a"}]))
    lists = write("y.jsonl", json_lines([{"input": ["b"]}]))
    with pytest.raises(DataError, match=r"x\.jsonl, .*y\.jsonl cannot be blended: .*input"):
        load(f"{texts},{lists}")


def test_thirds_written_with_three_digits_are_thirds(two_files: str, write: Write) -> None:
    third = write("third.jsonl", json_lines([{"input": "z"}] * 30))
    names = inputs(load(f"{two_files},{third}", probs="0.333,0.333,0.333"))
    assert {*names} > {"z", "x59", "y19"}


def test_rows_that_are_drawn_again_and_again_are_announced(two_files: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = load(two_files, probs="0.5,0.5")
    times = sum(name.startswith("y") for name in inputs(rows)) / 20
    said = capsys.readouterr().err
    assert "few.jsonl is drawn about 3.0 times: its probability is 0.5" in said and "many.jsonl" not in said
    assert times == pytest.approx(3, abs=1)
    load(two_files, probs="0.75,0.25")
    assert capsys.readouterr().err == ""


# ---- numbers that are text


def test_only_an_empty_cell_of_a_csv_file_is_null(write: Write) -> None:
    rows = load(write("x.csv", "output,number\nNone,1\nNA,\nnull,3\n"), text=["output"])
    assert rows["output"] == ["None", "NA", "null"] and rows["number"] == [1.0, None, 3.0]


@pytest.mark.parametrize("place", ["x.csv", "folder/train.csv"])
def test_digits_of_a_named_column_of_a_csv_file_stay_text(place: str, write: Write) -> None:
    path = write(place, "input,label,margin\na,007,0.5\nb,,1.5\n")
    rows = load(path if place == "x.csv" else str(Path(path).parent), text=["label", "another"])
    assert rows["label"][:] == ["007", None]
    assert rows["margin"][:] == [0.5, 1.5]


# ---- mistakes


def test_a_missing_split_is_answered_with_the_splits_there_are(write: Write, tmp_path: Path) -> None:
    write("data/train.jsonl", json_lines(ROWS))
    write("data/test.jsonl", json_lines(ROWS))
    with pytest.raises(DataError, match=r"no split 'dev'; it has 'train', 'test'\. Set .*--eval\.split"):
        load(str(tmp_path / "data"), split="dev")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.jsonl"):
        load(str(tmp_path / "none.jsonl"))


def test_a_hub_name_that_cannot_be_reached_is_said_to_be_one() -> None:
    with pytest.raises(
        DataError, match=r"nobody/nothing could not be loaded from the hub \(there is no file or folder"
    ):
        load("nobody/nothing")


def test_a_loading_script_is_refused_with_what_to_do(write: Write, tmp_path: Path) -> None:
    write("set/set.py", "print('hi')")
    with pytest.raises(DataError, match=r"dataset scripts are not run\. Name a converted copy"):
        load(str(tmp_path / "set"))


def test_a_file_of_an_unknown_kind_is_answered_with_the_kinds_there_are(write: Write) -> None:
    with pytest.raises(DataError, match=r"unknown format. Known are \.json, \.jsonl"):
        load(write("x.tsv", "a"))


@pytest.mark.parametrize(
    ("name", "text"), [("x.jsonl", ""), ("x.jsonl", "\n\n"), ("x.json", "[]"), ("x.csv", "input,label\n")]
)
def test_a_file_without_rows_is_an_error(name: str, text: str, write: Write) -> None:
    with pytest.raises(DataError, match=rf"{name} has no rows"):
        load(write(name, text))


def test_an_empty_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with pytest.raises(DataError, match=r"could not be read.*data"):
        load(str(tmp_path / "data"))


def test_a_saved_dataset_without_rows_is_an_error(tmp_path: Path) -> None:
    Dataset.from_dict({"input": []}).save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match="saved has no rows"):
        load(str(tmp_path / "saved"))


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("x.jsonl", '{"a": 1}\n{"a": 2\n{"a": 3}\n', r"x\.jsonl could not be read.*JSON.* in row 1"),
        ("x.jsonl", "1\n2\n", "could not be read.*JSON.* in row 0"),
        ("x.json", '[{"a": 1},\n{"a": 2]', r"x\.json could not be read.*position 18"),
        ("x.csv", "a,b\n1,2\n1,2,3\n", r"x\.csv could not be read.*line 3"),
        ("x.parquet", "hello", r"x\.parquet could not be read"),
        ("x.arrow", "hello", r"x\.arrow could not be read"),
    ],
)
def test_a_malformed_file_is_named_with_the_line(name: str, text: str, complaint: str, write: Write) -> None:
    with pytest.raises(DataError, match=complaint):
        load(write(name, text))


def test_a_file_that_is_not_gzipped_but_says_so_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
    path.write_text('{"a": 1}\n')
    with pytest.raises(DataError, match="Not a gzipped file"):
        load(str(path))


def test_a_malformed_file_in_a_folder_is_named(
    write: Write, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("datasets"), "propagate", True)
    write("data/one.jsonl", json_lines(ROWS))
    write("data/two.jsonl", '{"input": "a"\n')
    with pytest.raises(DataError, match=r"data could not be read.*JSON"):
        load(str(tmp_path / "data"))
    assert "two.jsonl" in caplog.text  # the library has said which


def test_text_that_is_not_utf8_is_named_by_row(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a": "x"}\n{"a": "\xff"}\n')
    rows = load(str(path))
    with pytest.raises(DataError, match=r"x\.jsonl, row 2: is not valid UTF-8 text"):
        map_rows(rows, ["a"], lambda batch: {"a": batch["a"]}, Features({"a": Value("string")}), "Reading")


def test_a_file_may_be_named_twice_in_a_blend(write: Write) -> None:
    path = write("x.jsonl", json_lines([{"input": "a"}, {"input": "b"}]))
    assert {*inputs(load(f"{path},{path}", probs="0.5,0.5"))} == {"a", "b"}
