"""Tests for which checkpoints the checkpoint manager keeps, finds and rejects.

Crashes and full disks are tested in `test_crash_safety.py`.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from openrlhf import files as checkpoint_files
from openrlhf.checkpoints.manager import GIB, CheckpointManager, evictions
from openrlhf.checkpoints.manifest import (
    Checkpoint,
    CheckpointError,
    RunState,
    StagedCheckpoint,
    StateLayout,
)
from openrlhf.config.shared import CheckpointConfig
from tests.checkpoints.kept import checkpoints_in

RL = ("_actor", "_critic")


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def fill(staged: StagedCheckpoint, text: str = "weights") -> None:
    """Write the files of a checkpoint as the ranks would.

    The files are those in `<directory>/<tag>`, DeepSpeed's `latest` file, and an export.
    """
    for place in staged.places:
        path = staged.directory / place / "model_states.pt"
        path.write_text(f"{text} of {place}")
        (path.parent.parent / "latest").write_text("a pointer of DeepSpeed's that is not ours")


def save(
    manager: CheckpointManager,
    step: int,
    metric: float | None = None,
    *,
    text: str = "weights",
    **begin: bool,
) -> Checkpoint:
    staged = manager.begin(step, **begin)
    fill(staged, text)
    return manager.commit(
        staged, state=RunState(step=step, best_metric_key="eval_pass1"), metric_value=metric
    )


def tags(manager: CheckpointManager) -> list[str]:
    return [checkpoint.tag for checkpoint in manager.checkpoints()]


def tree(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


# ---------------------------------------------------------------- layout


def test_offline_checkpoint_has_the_layout_that_deepspeed_expects(tmp_path: Path) -> None:
    manager = checkpoints_in(tmp_path)
    staged = manager.begin(20, hf=True)
    assert not list(Path(staged.engine_dir()).glob("global_step20/*"))  # no other user
    fill(staged)
    checkpoint = manager.commit(
        staged, state=RunState(step=20, best_metric_key="loss"), metric_value=0.5
    )
    assert tree(tmp_path) == {
        "latest",
        "global_step20.manifest.json",
        "global_step20/model_states.pt",
        "global_step20/metric.json",
        "global_step20_hf/model_states.pt",
    }
    assert (tmp_path / "latest").read_text() == "global_step20"
    metric = json.loads((tmp_path / "global_step20/metric.json").read_text())
    assert metric == {"metric_key": "loss", "metric_value": 0.5}
    assert checkpoint.engine_dir() == str(tmp_path)
    assert checkpoint.hf_dir == str(tmp_path / "global_step20_hf")


def test_rl_checkpoint_has_one_directory_per_training_engine(tmp_path: Path) -> None:
    manager = checkpoints_in(tmp_path, parts=RL)
    checkpoint = save(manager, 20, best=True, hf=True)
    for part in RL:
        assert (tmp_path / part / "best_global_step20" / "model_states.pt").is_file()
        assert (tmp_path / part / "latest").read_text() == "best_global_step20"
        assert checkpoint.engine_dir(part) == str(tmp_path / part)
    assert checkpoint.parts == RL
    assert (tmp_path / "best_global_step20_hf" / "model_states.pt").is_file()
    assert json.loads((tmp_path / "_actor/best_global_step20/metric.json").read_text()) == {
        "metric_key": "eval_pass1",
        "metric_value": None,
    }


def test_checkpoint_paths_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    staged = checkpoints_in("ckpt/deep").begin(1, hf=True)
    assert os.path.isabs(staged.engine_dir())
    assert staged.hf_dir.startswith(str(tmp_path / "ckpt" / "deep"))


def test_best_and_regular_checkpoint_of_a_step_share_their_engine_files(tmp_path: Path) -> None:
    manager = checkpoints_in(tmp_path, parts=RL)
    best = save(manager, 20, 0.5, best=True, hf=True)
    regular = manager.save_linked(20)
    assert regular and tags(manager) == ["best_global_step20", "global_step20"]
    assert manager.latest() == regular
    assert (regular.state, regular.metric_value) == (best.state, best.metric_value)
    for place in regular.places:
        path = tmp_path / place / "model_states.pt"
        twin = tmp_path / place.replace("global_step20", "best_global_step20") / path.name
        assert path.read_text() == twin.read_text()
        assert os.path.samefile(path, twin) == (place in regular.places[: len(RL)])
    save(manager, 21, 0.6, best=True)
    assert tags(manager) == ["global_step20", "best_global_step21"]
    assert manager.find(20, best=False) == regular


def test_checkpoint_is_not_linked_on_a_file_system_without_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: object, target: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    manager = checkpoints_in(tmp_path)
    save(manager, 20, 0.5, best=True)
    before = tree(tmp_path)
    monkeypatch.setattr(os, "link", refuse)
    assert manager.save_linked(20) is None
    assert tree(tmp_path) == before
    assert not list(tmp_path.glob(".tmp-*"))


def test_only_the_step_that_this_manager_last_saved_as_the_best_is_linked(tmp_path: Path) -> None:
    """Another run may have saved the best checkpoint of an earlier manager."""
    manager = checkpoints_in(tmp_path)
    save(manager, 19, best=True)
    assert manager.save_linked(20) is None
    save(manager, 20, best=True)
    save(manager, 21)
    assert manager.save_linked(19) is manager.save_linked(21) is None
    assert checkpoints_in(tmp_path).save_linked(20) is None
    assert tags(manager) == ["best_global_step20", "global_step21"]
    assert manager.save_linked(20)
    assert tags(manager) == ["best_global_step20", "global_step21", "global_step20"]


def test_export_only_checkpoint_is_kept_but_never_resumed_from(tmp_path: Path) -> None:
    manager = checkpoints_in(tmp_path, parts=())
    assert save(manager, 1, hf=True).parts == ()
    assert tags(manager) == ["global_step1"]
    assert checkpoints_in(tmp_path).latest() is None


# ---------------------------------------------------------------- state


def test_run_state_is_restored_exactly(tmp_path: Path) -> None:
    state = RunState(
        step=7,
        epoch=1,
        consumed=448,
        kl_coef=0.1 + 0.2,
        best_metric_key="eval_gsm8k_pass1",
        best_metric_value=-math.inf,
        run_dir="runs/π",
        engines={"_actor": StateLayout(world_size=4, zero_stage=3, tensor_parallel_size=2)},
        identity={"epoch": 1, "nested": [{"seed": 2**63}, None, True]},
    )
    manager = checkpoints_in(tmp_path)
    staged = manager.begin(7)
    fill(staged)
    saved = manager.commit(staged, state=state)
    found = checkpoints_in(tmp_path).latest()
    assert found == saved
    assert found is not None and found.state == state


@pytest.mark.parametrize("identity", [{"t": (1, 2)}, {3: 4}, {"b": b"\0"}, {"s": {1}}])
def test_run_state_identity_that_json_would_change_is_rejected(identity: dict) -> None:
    with pytest.raises(AssertionError):
        RunState(step=1, identity=identity)


def test_manifest_with_unknown_fields_is_not_treated_as_damaged(tmp_path: Path) -> None:
    """The manifest may have been written by a newer version of the program."""
    manager = checkpoints_in(tmp_path)
    save(manager, 1)
    path = tmp_path / "global_step1.manifest.json"
    manifest = json.loads(path.read_text())
    manifest["checkpoint"]["invented"] = True
    text = json.dumps(manifest["checkpoint"], sort_keys=True)
    manifest["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(json.dumps(manifest))
    with pytest.raises(TypeError, match="invented"):
        manager.latest()
    assert json.loads(path.read_text()) == manifest


def test_run_whose_folder_was_moved_continues_at_the_new_path(tmp_path: Path) -> None:
    own, given = tmp_path / "own", tmp_path / "given"
    state = RunState(step=1, run_dir=str(own))
    assert state.continued_folder(str(given)) == str(own), (
        "neither exists, so a deleted folder is created again"
    )
    given.mkdir()
    assert state.continued_folder(str(given)) == str(given)
    own.mkdir()
    assert state.continued_folder(str(given)) == str(own)


def test_commit_rejects_the_run_state_of_a_different_step(tmp_path: Path) -> None:
    manager = checkpoints_in(tmp_path)
    with pytest.raises(AssertionError):
        manager.commit(manager.begin(2), state=RunState(step=3))


# ---------------------------------------------------------------- finding


def test_latest_warns_and_returns_none_for_an_empty_or_missing_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checkpoints_in(tmp_path / "none").latest() is None
    assert f"--ckpt.path {tmp_path / 'none'}" in capsys.readouterr().err
    (tmp_path / "_actor").mkdir()
    assert checkpoints_in(tmp_path, parts=RL).latest() is None
    assert not (tmp_path / "none").exists()


def test_latest_returns_the_newest_save_regardless_of_type_and_step(
    tmp_path: Path,
) -> None:
    manager = checkpoints_in(tmp_path, max_num=9)
    for step, best in [(10, False), (10, True), (20, False), (5, False), (4, True)]:
        # If a new run reuses the path of an older run, step 5 can be saved after step 20.
        checkpoint = save(manager, step, best=best)
        assert checkpoints_in(tmp_path).latest() == checkpoint


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "place", "message"),
    [
        (cut, "_critic/global_step2/model_states.pt", " 30 bytes instead of 31"),
        (flip, "_critic/global_step2/model_states.pt", "_critic/global_step2/model_states.pt"),
        (Path.unlink, "_actor/global_step2/metric.json", "_actor/global_step2/metric.json"),
        (shutil.rmtree, "_critic/global_step2", "_critic/global_step2/metric.json"),
        (flip, "global_step2_hf/model_states.pt", "global_step2_hf/model_states.pt"),
        (cut, "global_step2.manifest.json", "global_step2.manifest.json"),
        (flip, "global_step2.manifest.json", "global_step2.manifest.json"),
    ],
)
def test_latest_skips_a_damaged_checkpoint_with_a_warning_that_names_the_damage(
    harm, place: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manager = checkpoints_in(tmp_path, parts=RL)
    first = save(manager, 1)
    save(manager, 2, hf=True)
    harm(tmp_path / place)
    manager = checkpoints_in(tmp_path, parts=RL)
    assert manager.latest() == first
    assert message in capsys.readouterr().err
    again = save(manager, 2)
    assert checkpoints_in(tmp_path, parts=RL).latest() == again


def test_changed_digit_in_a_manifest_is_detected(tmp_path: Path) -> None:
    save(checkpoints_in(tmp_path), 1)
    manifest = tmp_path / "global_step1.manifest.json"
    good = manifest.read_text()
    assert '"step": 1' in good
    manifest.write_text(good.replace('"step": 1', '"step": 9'))
    assert checkpoints_in(tmp_path).latest() is None


def test_manifest_in_a_different_format_is_rejected_and_kept(tmp_path: Path) -> None:
    save(checkpoints_in(tmp_path), 1)
    manifest = tmp_path / "global_step1.manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(CheckpointError, match="format 2"):
        checkpoints_in(tmp_path).latest()
    with pytest.raises(CheckpointError, match="format 2"):
        checkpoints_in(tmp_path).begin(2)
    assert manifest.exists()


def test_latest_rejects_a_checkpoint_that_lacks_a_required_critic(tmp_path: Path) -> None:
    save(checkpoints_in(tmp_path, parts=("_actor",)), 1)
    with pytest.raises(CheckpointError, match=r"\['_actor'\].*also needs \['_critic'\]"):
        checkpoints_in(tmp_path, parts=RL).latest()


def test_latest_accepts_a_checkpoint_with_an_unused_critic(tmp_path: Path) -> None:
    save(checkpoints_in(tmp_path, parts=RL), 1)
    assert checkpoints_in(tmp_path, parts=("_actor",)).latest() is not None


def test_directories_of_other_programs_are_skipped_and_never_deleted(tmp_path: Path) -> None:
    others = ["_actor/global_step1/x.pt", "_actor/global_step1_uni/x", "_actor/mine/x", "notes.txt"]
    for name in others:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("theirs")
    manager = checkpoints_in(tmp_path, parts=("_actor",), max_num=1)
    assert manager.latest() is None
    for step in (1, 2, 3):  # step 1 collides with the other program's directory
        save(manager, step)
    left = {path for path in tree(tmp_path) if (tmp_path / path).read_text() == "theirs"}
    assert len(left) == len(others)
    assert any(path.startswith("_actor/global_step1.") for path in left)
    assert tags(manager) == ["global_step3"]


# ---------------------------------------------------------------- rotation


def listed(*rows: tuple[str, float | None, float], key: str = "eval_pass1") -> list[Checkpoint]:
    """Return one checkpoint per (tag, metric, GiB) row, oldest first."""
    return [
        Checkpoint(
            directory=Path("/"),
            tag=tag,
            nonce=f"nonce of {tag}",
            sequence=sequence,
            places=(tag,),
            files={f"{tag}/model": (int(gib * GIB), "")},
            metric_key=key,
            metric_value=metric,
            state=RunState(step=sequence),
        )
        for sequence, (tag, metric, gib) in enumerate(rows)
    ]


@pytest.mark.parametrize(
    ("rows", "max_num", "max_gib", "gone"),
    [
        ([("a", None, 1), ("b", None, 1), ("c", None, 1)], 3, math.inf, []),
        ([("a", None, 1), ("b", None, 1), ("c", None, 1)], 2, math.inf, ["a"]),  # the oldest
        ([("a", 0.9, 1), ("b", 0.1, 1), ("c", 0.5, 1)], 2, math.inf, ["b"]),  # the lowest
        ([("a", -2.0, 1), ("b", None, 1), ("c", 0.5, 1)], 2, math.inf, ["b"]),  # without a metric
        ([("a", 0.9, 1), ("b", 0.8, 1), ("c", None, 1)], 2, math.inf, ["b"]),  # never the newest
        ([("a", 0.9, 1), ("b", 0.8, 1), ("c", 0.1, 1)], 1, math.inf, ["b", "a"]),
        ([("a", 0.5, 1), ("b", 0.5, 1), ("c", 0.5, 1)], 2, math.inf, ["a"]),  # ties: the oldest
        ([("a", 0.0, 1), ("b", -0.5, 1), ("c", None, 1)], 2, math.inf, ["b"]),  # 0 is valid
        ([("a", None, 1), ("b", None, 1), ("c", None, 1)], 9, 2.0, ["a"]),  # the newest counts
        ([("a", None, 1), ("b", None, 1), ("c", None, 3)], 9, 3.5, ["a", "b"]),
        (
            [("a", None, 1), ("b", None, 5)],
            9,
            3.0,
            ["a"],
        ),  # the newest checkpoint is kept although it exceeds the limit
        ([("best_a", 0.9, 1), ("b", 0.1, 1), ("c", 0.2, 1)], 2, math.inf, []),  # best: not counted
        (
            [("best_a", 0.9, 1), ("b", 0.1, 1), ("c", 0.2, 1)],
            9,
            2.0,
            ["b"],
        ),  # the size of a best checkpoint counts toward the limit
        ([("best_a", 0.1, 1), ("b", 0.5, 1), ("best_c", 0.9, 1)], 9, math.inf, ["best_a"]),
        ([("best_a", 0.1, 1), ("best_b", 0.2, 1), ("c", 0.9, 1)], 9, math.inf, ["best_a"]),
        ([("best_a", 0.1, 2), ("b", 0.5, 1), ("best_c", 0.9, 2)], 9, 3.0, ["best_a"]),
    ],
)
def test_evictions_follow_the_rotation_rules(
    rows: list, max_num: int, max_gib: float, gone: list[str]
) -> None:
    evicted = evictions(listed(*rows), max_num=max_num, max_bytes=max_gib * GIB)
    assert [checkpoint.tag for checkpoint in evicted] == gone


def test_evictions_remove_the_highest_loss_first() -> None:
    checkpoints = listed(("a", 0.1, 1), ("b", 0.9, 1), ("c", 0.5, 1), key="eval gpt_loss")
    assert [
        checkpoint.tag for checkpoint in evictions(checkpoints, max_num=2, max_bytes=math.inf)
    ] == ["b"]


def test_find_returns_the_complete_checkpoint_of_a_step(tmp_path: Path) -> None:
    manager = checkpoints_in(tmp_path)
    regular = save(manager, 1)
    assert manager.find(1, best=False) == regular
    assert manager.find(2, best=False) is manager.find(1, best=True) is None
    cut(tmp_path / "global_step1" / "model_states.pt")
    assert manager.find(1, best=False) is None


def test_evictions_remove_damaged_checkpoints_first() -> None:
    checkpoints = listed(("a", None, 1), ("b", 0.9, 1), ("c", 0.1, 1))
    evicted = evictions(checkpoints, max_num=2, max_bytes=math.inf, damaged={"nonce of b"})
    assert [checkpoint.tag for checkpoint in evicted] == ["b"]


def test_damaged_checkpoint_does_not_displace_a_complete_one(tmp_path: Path) -> None:
    manager = checkpoints_in(tmp_path, max_num=2)
    save(manager, 1, metric=0.1)
    save(manager, 2, metric=0.9)
    cut(tmp_path / "global_step2" / "model_states.pt")
    manager = checkpoints_in(tmp_path, max_num=2)
    manager.latest()
    save(manager, 3)
    assert tags(manager) == ["global_step1", "global_step3"]


def test_max_num_counts_the_newest_checkpoint_and_evictions_remove_exports_too(
    tmp_path: Path,
) -> None:
    manager = checkpoints_in(tmp_path, parts=RL, max_num=2)
    for step in range(1, 6):
        save(manager, step, hf=True)
        assert len(tags(manager)) == min(step, 2)
    assert tags(manager) == ["global_step4", "global_step5"]
    for place in ("_actor/*/", "_critic/*/"):
        assert {path.name for path in tmp_path.glob(place)} == {"global_step4", "global_step5"}
    assert {path.name for path in tmp_path.glob("*_hf")} == {"global_step4_hf", "global_step5_hf"}


def test_max_mem_counts_the_bytes_of_all_parts(tmp_path: Path) -> None:
    size = save(checkpoints_in(tmp_path / "probe", parts=RL), 1).size
    on_disk = sum(path.stat().st_size for path in (tmp_path / "probe").rglob("global_step1/*"))
    assert size == on_disk
    manager = checkpoints_in(tmp_path / "ckpt", parts=RL, max_mem_gib=2.5 * size / GIB)
    for step in (1, 2, 3):
        save(manager, step)
    assert tags(manager) == ["global_step2", "global_step3"]


LARGE = "weights" * 1000  # much larger than metric.json, which linked checkpoints do not share


def test_max_mem_counts_the_files_that_two_checkpoints_share_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = save(checkpoints_in(tmp_path / "probe"), 1, text=LARGE).size
    manager = checkpoints_in(tmp_path / "ckpt", max_mem_gib=2.5 * size / GIB)
    save(manager, 1, text=LARGE)
    save(manager, 2, best=True, text=LARGE)
    assert manager.save_linked(2)
    assert tags(manager) == ["global_step1", "best_global_step2", "global_step2"]
    assert capsys.readouterr().err == ""


def test_removal_of_a_linked_checkpoint_does_not_count_as_freed_space(tmp_path: Path) -> None:
    size = save(checkpoints_in(tmp_path / "probe"), 1, text=LARGE).size
    manager = checkpoints_in(tmp_path / "ckpt", max_num=9, max_mem_gib=2.5 * size / GIB)
    save(manager, 1, 0.1, best=True, text=LARGE)
    assert manager.save_linked(1)
    save(manager, 2, 0.5, text=LARGE)
    assert tags(manager) == ["best_global_step1", "global_step1", "global_step2"]
    save(manager, 3, 0.6, text=LARGE)
    assert tags(manager) == ["best_global_step1", "global_step3"]


def test_evictions_look_up_each_file_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up: list[Path] = []
    monkeypatch.setattr(Path, "stat", lambda path: looked_up.append(path) or os.stat("/"))
    rows = listed(*((f"global_step{step}", None, 1.0) for step in range(9)))
    assert len(evictions(rows, max_num=2, max_bytes=math.inf)) == 7
    assert len(looked_up) == len(set(looked_up)) == 9


def test_newest_checkpoint_over_max_mem_is_kept_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manager = checkpoints_in(tmp_path, max_mem_gib=1e-9)
    save(manager, 1)
    save(manager, 2)
    assert tags(manager) == ["global_step2"]
    assert "--ckpt.max_mem" in capsys.readouterr().err


def test_nonfinite_metric_counts_as_none(tmp_path: Path) -> None:
    manager = checkpoints_in(tmp_path, max_num=2)
    for step, metric in [(1, 0.1), (2, math.nan), (3, 0.05)]:
        save(manager, step, metric)
    assert tags(manager) == ["global_step1", "global_step3"]


def test_best_checkpoint_is_kept_until_the_next_best_is_committed(tmp_path: Path) -> None:
    manager = checkpoints_in(tmp_path, max_num=1)
    save(manager, 1, 0.5, best=True)
    for step in (2, 3):
        save(manager, step, 0.9)
    staged = manager.begin(4, best=True)
    fill(staged)
    assert tags(manager) == ["best_global_step1", "global_step3"]  # until the commit
    manager.commit(staged, state=RunState(step=4))
    assert tags(manager) == ["global_step3", "best_global_step4"]
    assert not (tmp_path / "best_global_step1").exists()


def test_checkpoints_from_a_different_run_in_the_same_folder_are_kept(tmp_path: Path) -> None:
    manager = checkpoints_in(tmp_path, max_num=1)

    def save_of(run: str, step: int) -> None:
        staged = manager.begin(step)
        fill(staged)
        manager.commit(staged, state=RunState(step=step, run_dir=run))

    for run, step in (("a", 8), ("a", 9), ("b", 1), ("b", 2)):
        save_of(run, step)
    assert sorted(tags(manager)) == ["global_step2", "global_step9"]


def test_path_that_deepspeed_would_treat_as_a_pattern_is_rejected(
    tmp_path: Path,
) -> None:
    with pytest.raises(CheckpointError, match=r"--ckpt\.path .*run\[1\]"):
        checkpoints_in(tmp_path / "run[1]")


# ---------------------------------------------------------------- failing saves


def test_second_save_with_the_same_tag_replaces_the_first(tmp_path: Path) -> None:
    manager = checkpoints_in(tmp_path, parts=RL)
    save(manager, 1, hf=True)
    staged = manager.begin(1)
    fill(staged, "newer")
    again = manager.commit(staged, state=RunState(step=1))
    assert manager.checkpoints() == [again] == [checkpoints_in(tmp_path, parts=RL).latest()]
    text = (tmp_path / "_actor/global_step1/model_states.pt").read_text()
    assert text.startswith("newer")
    assert not any(path.name.startswith(".") for path in tmp_path.iterdir())


def test_discarded_save_leaves_other_checkpoints_unchanged(tmp_path: Path) -> None:
    manager = checkpoints_in(tmp_path)
    first = save(manager, 1)
    staged = manager.begin(2)
    fill(staged)
    manager.begin(9)
    assert not staged.directory.exists()
    assert manager.latest() == first


def test_commit_fails_if_an_engine_wrote_no_files(tmp_path: Path) -> None:
    manager = checkpoints_in(tmp_path, parts=RL)
    first = save(manager, 1)
    staged = manager.begin(2)
    (Path(staged.engine_dir("_actor")) / staged.tag / "model_states.pt").write_text("weights")
    with pytest.raises(CheckpointError, match=r"_critic/global_step2"):
        manager.commit(staged, state=RunState(step=2))
    assert manager.latest() == first


def test_full_disk_is_rejected_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = checkpoints_in(tmp_path, max_num=2)
    first = save(manager, 1)
    free = first.size - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    before = tree(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        manager.begin(2)
    message = str(caught.value)
    assert message.startswith("global_step2 ") and f"--ckpt.path {tmp_path}" in message
    assert f" {first.size / GIB:.4g} GiB" in message and f" {free / GIB:.4g} GiB" in message
    assert "--ckpt.max_num (now 2)" in message
    assert tree(tmp_path) == before
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free + 1))
    manager.begin(2)


@pytest.mark.parametrize(
    ("free", "max_num", "max_mem", "ends"),
    [
        (99, 3, 1e8, "error"),
        (100, 3, 1e8, "notice"),
        (399, 3, 1e8, "notice"),
        (400, 3, 1e8, ""),
        (399, 3, 250.0, ""),
    ],
)
def test_check_room_compares_free_space_with_the_limits_set_by_flags(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    free: int,
    max_num: int,
    max_mem: float,
    ends: str,
) -> None:
    """A checkpoint takes 100 GiB, and a save needs room for --ckpt.max_num + 1 checkpoints."""
    manager = CheckpointManager(
        CheckpointConfig(path=str(tmp_path / "new"), max_num=max_num, max_mem=max_mem)
    )
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: SimpleNamespace(free=free * GIB, total=1000 * GIB)
    )
    found = manager.check_room(100 * GIB)
    assert [finding.fails for finding in found] == {"": [], "notice": [False], "error": [True]}[
        ends
    ]
    for finding in found:
        for words in ("--ckpt.path", f"{free} GiB", "100 GiB", f"--ckpt.max_num {max_num}"):
            assert words in finding.seen


def test_check_room_counts_the_files_that_two_checkpoints_share_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One checkpoint is kept and frees its size; two new ones need 2.8 times that size."""
    manager = checkpoints_in(tmp_path, max_num=1)
    best = save(manager, 1, best=True, text=LARGE)
    assert manager.save_linked(1)
    disk = SimpleNamespace(free=1.5 * best.size, total=1000 * GIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk)
    found = manager.check_room(int(1.4 * best.size))
    assert [finding.fails for finding in found] == [False]


def test_check_room_accepts_a_file_system_that_does_not_report_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0, total=0))
    assert checkpoints_in(tmp_path).check_room(100 * GIB) == []


def test_full_disk_during_a_save_is_reported_as_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk, torch reports only an unexpected file position."""
    manager = checkpoints_in(tmp_path)
    staged = manager.begin(2)

    def write(
        message: str = (
            "[enforce fail at inline_container.cc:664] . unexpected pos 283200 vs 283088"
        ),
    ) -> None:
        with manager.writing(staged):
            raise RuntimeError(message)

    # The disk has free space, so the cause may be a quota.
    with pytest.raises(CheckpointError, match=r"--ckpt\.path .*unexpected pos"):
        write()
    with pytest.raises(RuntimeError, match=r"^a defect$"):
        write("a defect")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=4096))
    with pytest.raises(
        CheckpointError,
        match=r"global_step2 .*--ckpt\.path .*No space left on device.*--ckpt\.max_num",
    ):
        write()


def test_vanished_checkpoint_folder_is_reported_as_a_failed_write(tmp_path: Path) -> None:
    """A network file system may be unmounted during a save, for example."""
    manager = checkpoints_in(tmp_path / "ckpt")
    staged = manager.begin(2)
    missing = pytest.raises(CheckpointError, match="No such file or directory")
    with missing, manager.writing(staged):
        shutil.rmtree(tmp_path / "ckpt")
        fill(staged)


def test_error_names_the_unwritable_path(tmp_path: Path) -> None:
    (tmp_path / "ckpt").write_text("a file")
    with pytest.raises(CheckpointError, match=r"--ckpt\.path .*/ckpt"):
        checkpoints_in(tmp_path / "ckpt").begin(1)


def test_save_succeeds_even_if_older_checkpoints_cannot_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    manager = checkpoints_in(tmp_path, max_num=1)
    save(manager, 1)

    def refuse(path: Path) -> None:
        raise PermissionError(13, "busy", str(path))

    with monkeypatch.context() as context:
        context.setattr(shutil, "rmtree", refuse)
        second = save(manager, 2)
    assert str(tmp_path / ".tmp-global_step1") in capsys.readouterr().err
    assert manager.latest() == second
    assert not list(tmp_path.glob(".*"))  # `latest` has removed the leftovers


# ---------------------------------------------------------------- hashes


def test_fingerprint_covers_all_bytes_of_short_files(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for size in (
        1,
        checkpoint_files.HASH_BLOCK_BYTES - 1,
        checkpoint_files.HASH_BLOCK_BYTES + 1,
        300_000,
    ):
        path.write_bytes(os.urandom(size))
        before = checkpoint_files.fingerprint(path)
        for offset in {0, size // 2, size - 1}:
            content = bytearray(path.read_bytes())
            content[offset] ^= 1
            path.write_bytes(content)
            assert checkpoint_files.fingerprint(path) != before
            content[offset] ^= 1
            path.write_bytes(content)
        assert checkpoint_files.fingerprint(path) == before
    path.write_bytes(b"")
    assert checkpoint_files.fingerprint(path)


def test_fingerprint_of_long_files_detects_every_long_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_files, "HASH_BLOCK_BYTES", 16)
    size = checkpoint_files.HASHED_BLOCKS * 16 * 10
    content = os.urandom(size)
    path = tmp_path / "file"
    path.write_bytes(content)
    before = checkpoint_files.fingerprint(path)
    gap = size // (checkpoint_files.HASHED_BLOCKS - 1) + 1
    for start in [
        0,
        1,
        size // 3,
        size - gap,
    ]:  # the gap simulates pages that were never written to disk
        path.write_bytes(content[:start] + bytes(gap) + content[start + gap :])
        assert checkpoint_files.fingerprint(path) != before
    for offset in (0, size - 1):
        path.write_bytes(content[:offset] + bytes([content[offset] ^ 1]) + content[offset + 1 :])
        assert checkpoint_files.fingerprint(path) != before


def test_fingerprint_reads_at_most_16_mib_of_a_terabyte_file(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    with open(path, "wb") as file:
        file.truncate(2**40)
    assert checkpoint_files.HASHED_BLOCKS * checkpoint_files.HASH_BLOCK_BYTES == 16 * 2**20
    assert checkpoint_files.fingerprint(path)


def test_normal_run_logs_no_warnings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manager = checkpoints_in(tmp_path, parts=RL, max_num=1)
    for step in (1, 2):
        save(manager, step, best=True)
        save(manager, step, hf=True)
    assert manager.latest() is not None
    assert capsys.readouterr().err == ""
