"""Episodes on disk: exact values, atomic writes, and damaged files."""

from __future__ import annotations

import gzip
import json
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from openrlhf.core.trajectory import Failure, Prompt, Trajectory
from openrlhf.data.errors import DataError
from openrlhf.rollout.episode_files import EpisodeFolder
from tests.trainers.episodes import episode, failed

RUN = {"--rollout.batch_size": 2, "prompts": 24}
IN_ONE_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def anything(draw: st.DrawFn) -> Trajectory:
    """Draw an episode with random values in all fields, including fields that are added later."""
    length = draw(st.integers(0, 5))
    values = {name: st.from_type(hint) for name, hint in get_type_hints(Trajectory).items()}
    values |= {
        "tokens": st.lists(st.integers(0, 2**20), min_size=length, max_size=length),
        "action_mask": st.lists(st.booleans(), min_size=length, max_size=length).map(
            lambda m: [False, *m[1:]][:length]
        ),
        "rollout_logprobs": st.lists(st.floats(width=32), min_size=length, max_size=length),
        "extra_logs": st.dictionaries(st.text(), st.floats(), max_size=3),
        "columns": st.dictionaries(st.text(), st.lists(st.floats(), max_size=3), max_size=2),
        "earlier": st.just(()),
        "prompt": st.builds(Prompt, label=JSON, images=JSON, datasource=st.text()),
    }
    fields = {name: draw(value) for name, value in values.items()}
    plain = Trajectory(**fields)
    return replace(plain, earlier=(plain,) * draw(st.integers(0, 2)))


def written(folder: Path, *episodes: Trajectory) -> EpisodeFolder:
    made = EpisodeFolder(folder)
    made.begin(after=-1)
    made.write("step", 7, episodes, run=RUN)
    return made


@IN_ONE_FOLDER
@given(st.lists(anything(), max_size=3))
def test_episodes_are_read_back_unchanged(tmp_path: Path, episodes: list[Trajectory]) -> None:
    """The comparison uses `repr`, so a tuple differs from a list and NaN equals NaN."""
    assert repr(written(tmp_path, *episodes).read("step", 7)) == repr(episodes)


@pytest.mark.parametrize("text", ["naïve 中文 🙂", "line\nbreak\r\u2028\x00", "\ud83d alone"])
def test_unusual_characters_do_not_split_the_line_of_an_episode(tmp_path: Path, text: str) -> None:
    one = episode(score=1.0, text=text, response_text=text, error=text, failure=Failure.EXCEPTION)
    folder = written(tmp_path, one, one)
    assert folder.read("step", 7) == [one, one]
    assert len(gzip.decompress(folder.file("step", 7).read_bytes()).splitlines()) >= 3
    assert gzip.decompress(folder.file("step", 7).read_bytes()).count(b"\n") == 3


def test_label_that_is_not_json_serializable_is_written_as_text(tmp_path: Path) -> None:
    one = episode(score=1.0)
    odd = replace(one, prompt=replace(one.prompt, label={"key": b"bytes"}))
    [read] = written(tmp_path, odd).read("step", 7)
    assert read.prompt.label == {"key": "b'bytes'"}


def test_file_is_gzipped_json_lines_with_a_header(tmp_path: Path) -> None:
    folder = written(tmp_path, episode(3, 1, score=0.5), failed(4, 0))
    with gzip.open(folder.file("step", 7), "rt", encoding="utf-8") as file:
        head, *rows = map(json.loads, file)
    assert head == {"format": 1, "kind": "step", "step": 7, "episodes": 2, "run": RUN}
    assert [row.keys() for row in rows] == [{field.name for field in fields(Trajectory)}] * 2
    assert (rows[0]["prompt"]["index"], rows[0]["sample_index"], rows[0]["score"]) == (3, 1, 0.5)
    assert (rows[1]["stop_reason"], rows[1]["error"]) == ("failed", "it broke")


def test_identical_episodes_are_written_as_identical_bytes(tmp_path: Path) -> None:
    """A resumed run that generates the same samples writes the same files, whatever the time."""
    one, two = (written(tmp_path / name, episode(score=1.0)).file("step", 7) for name in "ab")
    assert one.read_bytes() == two.read_bytes()


# ---- a folder


def test_new_run_sets_aside_all_files_and_resumed_run_sets_aside_later_steps(
    tmp_path: Path,
) -> None:
    folder = written(tmp_path, episode(score=1.0))
    folder.write("step", 8, [failed()], run=RUN)
    folder.write("eval", 7, [failed()], run=RUN)
    (tmp_path / "notes.txt").write_text("mine")
    folder.begin(after=7)
    assert (folder.steps(), folder.last_step) == ([7], 7)
    assert folder.read("eval", 7) == [failed()]
    assert [path.name for path in tmp_path.glob("earlier/1/*")] == ["step-000008.jsonl.gz"]
    folder.begin(after=-1)
    assert (folder.steps(), folder.last_step) == ([], 0)
    assert len(list(tmp_path.glob("earlier/2/*"))) == 2
    assert (tmp_path / "notes.txt").exists()


def test_killed_write_preserves_the_previous_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written(tmp_path, episode(score=1.0))

    def killed(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", killed)
    for step in (7, 8):
        with pytest.raises(KeyboardInterrupt):
            folder.write("step", step, [failed(), failed()], run=RUN)
    assert folder.steps() == [7]
    assert folder.read("step", 7) == [episode(score=1.0)]


# ---- damage


def test_truncated_file_raises_an_error_wherever_it_ends(tmp_path: Path) -> None:
    folder = written(tmp_path, episode(0, score=1.0), episode(1, score=0.0))
    path = folder.file("step", 7)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError, match=r"step-000007.jsonl.gz, line \d"):
            folder.read("step", 7)


@IN_ONE_FOLDER
@given(st.data())
def test_flipped_bit_raises_an_error_or_is_harmless(tmp_path: Path, data: st.DataObject) -> None:
    """A few bits of the gzip header, such as the date's bits, are harmless."""
    episodes = [episode(index, score=float(index), actions=5) for index in range(3)]
    folder = written(tmp_path, *episodes)
    content = bytearray(folder.file("step", 7).read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    folder.file("step", 7).write_bytes(content)
    try:
        assert folder.read("step", 7) == episodes
    except DataError as error:
        assert str(folder.file("step", 7)) in str(error)


def edited(folder: EpisodeFolder, *lines: Any) -> EpisodeFolder:
    """Rewrite the file from `lines`: a number selects an old line, and other values become JSON."""
    path = folder.file("step", 7)
    old = gzip.decompress(path.read_bytes()).splitlines()
    new = [old[line] if isinstance(line, int) else json.dumps(line).encode() for line in lines]
    path.write_bytes(gzip.compress(b"\n".join(new)))
    return folder


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([0, 1], ["line 3", "1 of 2 episodes"]),
        ([0, 1, 2, 2], ["line 5", "3 of 2 episodes"]),
        ([{"format": 2}, 1, 2], ["line 1", "format 2", "reads format 1"]),
        ([{"hello": "world"}], ["line 1"]),
        ([[1, 2, 3]], ["line 1"]),
        ([], ["line 1"]),
        ([0, 1, {"tokens": [1]}], ["line 3", "missing"]),
        ([0, {"tokens": [1], "colour": "red"}, 2], ["line 2", "colour"]),
        ([0, 1, "text"], ["line 3"]),
        ([0, 1, 0], ["line 3"]),
    ],
    ids=["too few", "too many", "other format", "foreign", "no object", "empty", "fields missing",
         "unknown field", "no episode", "two headers"],
)  # fmt: skip
def test_error_names_line_that_is_not_an_episode(
    tmp_path: Path, lines: list[Any], words: list[str]
) -> None:
    folder = edited(written(tmp_path, episode(0, score=1.0), episode(1, score=0.0)), *lines)
    with pytest.raises(DataError) as caught:
        folder.read("step", 7)
    assert all(
        word in str(caught.value) for word in [*words, "step-000007.jsonl.gz", "--rollout.dump_dir"]
    ), caught.value


def test_packed_episodes_are_written_as_lists(tmp_path: Path) -> None:
    plain = replace(episode(), rollout_logprobs=[0.0, -0.25], columns={"values": [0.5, 0.25]})
    assert written(tmp_path, plain.packed()).read("step", 7) == [plain]
