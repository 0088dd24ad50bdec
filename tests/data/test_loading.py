"""Every way to specify a dataset works, and the error for every mistake suggests a fix."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
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
    """Save `ROWS` in the format given by the file's extension."""
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


NAMES = [
    "x.json",
    "x.jsonl",
    "x.csv",
    "x.parquet",
    "x.arrow",
    "x.json.gz",
    "x.jsonl.gz",
    "x.csv.gz",
    "x.v1.JSONL",
]


@pytest.mark.parametrize("name", NAMES)
def test_every_file_format_is_read(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    saved = save(path if name != "x.v1.JSONL" else tmp_path / "x.jsonl")
    if name == "x.v1.JSONL":
        saved = str(Path(saved).rename(path))
    rows = load(saved)
    assert inputs(rows) == ["a", "b", "c"]
    assert [str(label) for label in rows["label"]] == ["1", "2", "3"]


def test_rows_of_a_single_file_are_returned_for_any_split(write: Write, tmp_path: Path) -> None:
    write("held_out.jsonl", json_lines(ROWS))
    assert inputs(load(str(tmp_path / "held_out.jsonl"), split="test")) == ["a", "b", "c"]


def test_files_in_a_folder_are_selected_by_split_name(write: Write, tmp_path: Path) -> None:
    write("data/train.jsonl", json_lines(ROWS))
    write("data/test.jsonl", json_lines(ROWS[:1]))
    assert len(load(str(tmp_path / "data"))) == 3
    assert len(load(str(tmp_path / "data"), split="test")) == 1


def test_subfolder_is_selected_with_an_at_sign(write: Write, tmp_path: Path) -> None:
    write("data/easy/train.jsonl", json_lines(ROWS[:1]))
    write("data/hard/train.jsonl", json_lines(ROWS))
    assert len(load(f"{tmp_path}/data@hard")) == 3


def test_dataset_written_by_save_to_disk_is_read(tmp_path: Path) -> None:
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    assert inputs(load(str(tmp_path / "saved"), split="anything")) == ["a", "b", "c"]


def test_split_of_a_saved_dataset_dict_is_read(tmp_path: Path) -> None:
    DatasetDict(train=Dataset.from_list(ROWS), test=Dataset.from_list(ROWS[:1])).save_to_disk(
        tmp_path / "saved"
    )
    assert len(load(str(tmp_path / "saved"), split="test")) == 1
    assert len(load(f"{tmp_path}/saved@train")) == 3


def test_path_may_contain_an_at_sign(write: Write) -> None:
    assert len(load(write("a@b.jsonl", json_lines(ROWS)))) == 3


def test_strings_that_look_like_dates_are_not_converted(write: Write) -> None:
    path = write("x.jsonl", json_lines([{"label": "2024-05-06"}, {"label": "2024-05-07 10:00:00"}]))
    assert list(load(path)["label"]) == ["2024-05-06", "2024-05-07 10:00:00"]


# ---- blending


@pytest.fixture
def two_files(write: Write) -> str:
    many = [{"input": f"x{number}"} for number in range(60)]
    few = [{"input": f"y{number}"} for number in range(20)]
    return f"{write('many.jsonl', json_lines(many))}, {write('few.jsonl', json_lines(few))}"


def test_datasets_without_probabilities_are_concatenated(two_files: str) -> None:
    names = inputs(load(two_files))
    assert names == [f"x{number}" for number in range(60)] + [f"y{number}" for number in range(20)]


def test_max_samples_limits_each_dataset_and_the_blend(two_files: str) -> None:
    assert inputs(load(two_files, max_samples=30)) == [f"x{number}" for number in range(30)]
    assert inputs(load(two_files, max_samples=65)) == [f"x{number}" for number in range(60)] + [
        f"y{number}" for number in range(5)
    ]


def test_blend_with_probabilities_draws_every_row_at_least_once_and_in_file_order(
    two_files: str,
) -> None:
    names = inputs(load(two_files, probs="0.5,0.5"))
    assert {*names} == {f"x{number}" for number in range(60)} | {
        f"y{number}" for number in range(20)
    }
    first_x = [name for name in dict.fromkeys(names) if name.startswith("x")]
    assert first_x == [f"x{number}" for number in range(60)]
    share = sum(name.startswith("x") for name in names) / len(names)
    assert 0.35 < share < 0.65


def test_empty_parts_of_the_probabilities_are_ignored(two_files: str) -> None:
    """The rule of the flag ignores them, too."""
    assert inputs(load(two_files, probs="0.5, 0.5,")) == inputs(load(two_files, probs="0.5,0.5"))
    assert inputs(load(two_files, probs="")) == inputs(load(two_files))


def test_order_of_a_blend_depends_only_on_the_seed(two_files: str) -> None:
    orders = [inputs(load(two_files, probs="0.5,0.5", seed=seed)) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]


def test_draw_counts_follow_the_probabilities(two_files: str) -> None:
    names = inputs(load(two_files, probs="0.9,0.1"))
    assert 0.8 < sum(name.startswith("x") for name in names) / len(names) < 0.97


def test_rows_record_their_file_and_row_number(two_files: str) -> None:
    rows = load(two_files, probs="0.5,0.5").shuffle(seed=3)
    for row in rows.select(range(20)):
        assert f"{'many' if row['input'][0] == 'x' else 'few'}.jsonl" in row[SOURCE]
        assert row[ROW] == int(row["input"][1:]) + 1  # line numbers start at 1


def test_csv_and_json_files_can_be_blended(write: Write) -> None:
    files = write("x.jsonl", json_lines([{"input": "a"}])), write("x.csv", "input\nb\n")
    assert inputs(load(",".join(files))) == ["a", "b"]


def test_blended_columns_of_different_types_keep_their_values(write: Write) -> None:
    texts = write("x.jsonl", json_lines([{"input": "a"}]))
    lists = write("y.jsonl", json_lines([{"input": ["b"]}]))
    assert inputs(load(f"{texts},{lists}")) == ["a", ["b"]]


def test_probabilities_are_normalized_to_sum_to_one(two_files: str, write: Write) -> None:
    third = write("third.jsonl", json_lines([{"input": "z"}] * 30))
    names = inputs(load(f"{two_files},{third}", probs="0.333,0.333,0.333"))
    assert {*names} > {"z", "x59", "y19"}


def test_rows_that_are_drawn_several_times_on_average_are_reported(
    two_files: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = load(two_files, probs="0.5,0.5")
    times = sum(name.startswith("y") for name in inputs(rows)) / 20
    said = capsys.readouterr().err
    assert (
        "few.jsonl is drawn about 3.0 times: its probability is 0.5" in said
        and "many.jsonl" not in said
    )
    assert times == pytest.approx(3, abs=1)
    load(two_files, probs="0.75,0.25")
    assert capsys.readouterr().err == ""


# ---- numbers in text columns


def test_only_empty_csv_cells_are_null(write: Write) -> None:
    rows = load(write("x.csv", "output,number\nNone,1\nNA,\nnull,3\n"))
    assert rows["output"] == ["None", "NA", "null"] and rows["number"] == ["1", None, "3"]


@pytest.mark.parametrize("place", ["x.csv", "folder/train.csv", "x.tsv"])
def test_csv_cells_are_text_in_every_row_of_a_long_file(place: str, write: Write) -> None:
    answers = (
        ["yes"] * 10_000
        + [f"{number:05d}" for number in range(10_000)]
        + ["1.50", "True", "1e5", "-0"]
    )
    separator = "\t" if place.endswith("tsv") else ","
    path = write(place, "".join(f"{cell}{separator}x\n" for cell in ["output", *answers]))
    rows = load(path if place.startswith("x") else str(Path(path).parent), max_samples=10**6)
    assert rows["output"][:] == answers


def test_spreadsheet_csv_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes('\ufeffinput;output\r\n"a;\r\nb";x,y\r\n'.encode())
    assert [(row["input"], row["output"]) for row in load(str(path))] == [("a;\r\nb", "x,y")]


def test_csv_cell_may_contain_quotes_line_breaks_and_a_long_text(write: Write) -> None:
    long = "x" * 300_000
    rows = load(write("x.csv", f'input,output\n"say ""hi"",\n\nnow",{long}\n'))
    assert rows[0]["input"] == 'say "hi",\n\nnow' and rows[0]["output"] == long


# ---- mistakes


def test_error_for_a_missing_split_lists_the_available_splits(write: Write, tmp_path: Path) -> None:
    write("data/train.jsonl", json_lines(ROWS))
    write("data/test.jsonl", json_lines(ROWS))
    with pytest.raises(
        DataError, match=r"no split 'dev'; it has 'train', 'test'\. Set .*--eval\.split"
    ):
        load(str(tmp_path / "data"), split="dev")


def test_error_names_the_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.jsonl"):
        load(str(tmp_path / "none.jsonl"))


def test_error_for_an_unreachable_hub_repository_says_that_it_is_not_a_local_file() -> None:
    with pytest.raises(
        DataError,
        match=r"nobody/nothing could not be loaded from the hub \(no file or folder",
    ):
        load("nobody/nothing")


def test_dataset_script_is_rejected_with_a_suggested_fix(write: Write, tmp_path: Path) -> None:
    write("set/set.py", "print('hi')")
    with pytest.raises(DataError, match=r"dataset scripts are not run\. .*parquet or JSON"):
        load(str(tmp_path / "set"))


def test_error_for_an_unknown_file_format_lists_the_supported_formats(write: Write) -> None:
    with pytest.raises(DataError, match=r"x\.xlsx has an unknown format\. .*\.json, \.jsonl"):
        load(write("x.xlsx", "a"))


@pytest.mark.parametrize(
    ("name", "text"),
    [("x.jsonl", ""), ("x.jsonl", "\n\n"), ("x.json", "[]"), ("x.csv", "input,label\n")],
)
def test_file_without_rows_raises_an_error(name: str, text: str, write: Write) -> None:
    with pytest.raises(DataError, match=rf"{name} has no rows"):
        load(write(name, text))


def test_empty_folder_raises_an_error(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with pytest.raises(DataError, match=r"could not be read.*data"):
        load(str(tmp_path / "data"))


def test_saved_dataset_without_rows_raises_an_error(tmp_path: Path) -> None:
    Dataset.from_dict({"input": []}).save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match="saved has no rows"):
        load(str(tmp_path / "saved"))


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("x.jsonl", '{"a": 1}\n{"a": 2\n{"a": 3}\n', r"x\.jsonl, line 2: .*JSON"),
        (
            "x.jsonl",
            '{"a": 1}\n' * 5000 + '{"a": 2\n' + '{"a": 1}\n' * 5000,
            r"x\.jsonl, line 5001: .*JSON",
        ),
        ("x.jsonl", '{"a": 1}\n\n{"b": 1, "a": 1, "a": 2}\n', r"x\.jsonl, line 3: .*twice: 'a'"),
        ("x.jsonl", '{"a": "\\ud83d"}\n', r"x\.jsonl, line 1: "),
        ("x.jsonl", "\n1\n2\n", r"x\.jsonl, line 2: .*a number"),
        ("x.json", '[{"a": 1},\n{"a": 2]', r"x\.json, line 2: .*JSON"),
        ("x.json", '{\n"a": 1\n}\n{\n"a" 2\n}', r"x\.json, line 5: .*JSON"),
        ("x.json", '[{"a": 1}, [2]]', r"x\.json, row 2: .*a list"),
        ("x.csv", "a,b\n1,2\n1,2,3\n", r"x\.csv, line 3: .*3 fields.* 2 "),
        ("x.csv", 'a,b\n"1\n2",2\n\n1\n', r"x\.csv, line 5: .*1 fields.* 2 "),
        (
            "x.csv",
            "input,output\n" + "Translate this, please: cat,chat\n" * 2,
            r"x\.csv, line 2: .*3 fields.* 2 ",
        ),
        ("x.csv", 'a,b\n1,2\n"1,2\n1,2\n', r"x\.csv, line 3: .*quotes"),
        ("x.csv", 'a,b\n1,"2"3\n', r"x\.csv, line 2: .*quotes"),
        ("x.csv", "a,b,a\n1,2,3\n", r"x\.csv, line 1: .*'a'"),
        ("x.parquet", "hello", r"x\.parquet could not be read"),
        ("x.arrow", "hello", r"x\.arrow could not be read"),
    ],
)
def test_error_for_a_malformed_file_names_the_line(
    name: str, text: str, complaint: str, write: Write
) -> None:
    with pytest.raises(DataError, match=complaint):
        load(write(name, text))


def test_uncompressed_file_with_a_gz_extension_raises_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
    path.write_text('{"a": 1}\n')
    with pytest.raises(DataError, match="Not a gzipped file"):
        load(str(path))


def test_error_names_a_malformed_file_in_a_folder(write: Write, tmp_path: Path) -> None:
    write("data/one.jsonl", json_lines(ROWS))
    write("data/two.jsonl", '{"input": "a"\n')
    with pytest.raises(DataError, match=r"two\.jsonl, line 1"):
        load(str(tmp_path / "data"))


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.csv"])
@pytest.mark.parametrize("encoding", ["cp1252", "utf-16"])
def test_error_for_a_file_that_is_not_utf8_names_the_line(
    name: str, encoding: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    texts = {
        "x.jsonl": '{"a": "x"}\n{"a": "é"}\n',
        "x.json": '[{"a": "x"},\n{"a": "é"}]',
        "x.csv": "a\nx\né\n",
    }
    path.write_bytes(texts[name].encode(encoding))
    line = {"cp1252": 3 if name == "x.csv" else 2, "utf-16": 1}[encoding]
    with pytest.raises(DataError, match=rf"{name}, line {line} .*UTF-8"):
        load(str(path))


def test_error_for_saved_text_that_is_not_utf8_names_the_dataset_and_the_row(
    tmp_path: Path,
) -> None:
    broken = pa.array([b"x", b"\xff"]).view(pa.string())
    Dataset(pa.table({"a": broken})).save_to_disk(tmp_path / "saved")
    rows = load(str(tmp_path / "saved"))
    with pytest.raises(DataError, match=r"saved, row 2 has text that is not UTF-8"):
        map_rows(
            rows,
            ["a"],
            lambda batch: {"a": batch["a"]},
            Features({"a": Value("string")}),
        )


def test_file_may_be_listed_twice_in_a_blend(write: Write) -> None:
    path = write("x.jsonl", json_lines([{"input": "a"}, {"input": "b"}]))
    assert {*inputs(load(f"{path},{path}", probs="0.5,0.5"))} == {"a", "b"}
