"""Older checkpoints survive a save that is killed or runs out of disk space at any operation.

When run as a script, the module kills real processes (`drive`). The tests examine the files left
behind by killed processes.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import openrlhf
from openrlhf.checkpoints.manager import MANIFEST, CheckpointManager
from openrlhf.checkpoints.manifest import Checkpoint, CheckpointError, RunState
from tests.checkpoints.kept import checkpoints_in

RL = ("_actor", "_critic")
KEPT = 2
MODIFY = ["mkdir", "rename", "replace", "link"]
DELETE = ["unlink", "rmdir"]


class RankError(Exception):
    """The error of a rank that could not write its part of a checkpoint."""


def manager_of(root: Path) -> CheckpointManager:
    return checkpoints_in(root, parts=RL, max_num=KEPT)


def save(root: Path | CheckpointManager, step: int, label: str, **begin: bool) -> Checkpoint:
    """Save as a trainer does; `label` identifies the save."""
    manager = root if isinstance(root, CheckpointManager) else manager_of(root)
    staged = manager.begin(step, **begin)
    try:
        for place in staged.places:
            (staged.directory / place / "weights").write_text(label * 9)
    except OSError:
        raise RankError from None
    state = RunState(step=step, best_metric_key="pass1", identity={"label": label})
    return manager.commit(staged, state=state, metric_value=1 / step)


def save_best_and_regular(root: Path, step: int, label: str) -> None:
    """Save a step as the best and as a regular checkpoint that shares its engine files."""
    manager = manager_of(root)
    save(manager, step, label, best=True, hf=True)
    manager.save_linked(step)


def newest_label(manager: CheckpointManager) -> str | None:
    """Return the label of the newest checkpoint.

    Also checks that each checkpoint is complete and comes from a single save.
    """
    newest = manager.latest()
    for checkpoint in manager.checkpoints():
        assert checkpoint.damage() is None, checkpoint.tag
        for place in checkpoint.places:
            text = (manager.root / place / "weights").read_text()
            assert text == checkpoint.state.identity["label"] * 9, place
    return newest.state.identity["label"] if newest else None


Step = Callable[[Path], object]
# Each scenario has successful saves, followed by a save that fails.
SCENARIOS: dict[str, tuple[list[Step], Step]] = {
    "first save": ([], lambda root: save(root, 1, "new", hf=True)),
    "next save evicts": (
        [lambda root: save(root, 1, "a"), lambda root: save(root, 2, "old", hf=True)],
        lambda root: save(root, 3, "new"),
    ),
    "same tag again": (
        [lambda root: save(root, 1, "a"), lambda root: save(root, 2, "old", hf=True)],
        lambda root: save(root, 2, "new"),
    ),
    "new best": (
        [lambda root: save(root, 1, "a"), lambda root: save(root, 1, "old", best=True)],
        lambda root: save(root, 2, "new", best=True, hf=True),
    ),
    "best and regular": (
        [lambda root: save(root, 1, "a"), lambda root: save(root, 2, "old")],
        lambda root: save_best_and_regular(root, 3, "new"),
    ),
}


@contextmanager
def sabotage(strike: Callable[[int], None], operations: list[str]) -> Iterator[None]:
    """Call `strike(k)` before the k-th file operation; each half of a write is an operation."""
    count = 0
    real = {name: getattr(os, name) for name in [*operations, "fsync"]}
    real_open = builtins.open

    def tick() -> None:
        nonlocal count
        count += 1
        strike(count)

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*arguments: Any, **keywords: Any) -> Any:
            tick()
            return function(*arguments, **keywords)

        return operation

    def open_counted(path: Any, mode: str = "r", *arguments: Any, **keywords: Any) -> Any:
        if "w" not in mode:
            return real_open(path, mode, *arguments, **keywords)
        tick()
        file = real_open(path, mode, *arguments, **keywords)
        write = file.write

        def write_in_halves(text: str) -> int:
            write(text[: len(text) // 2])
            file.flush()
            tick()
            write(text[len(text) // 2 :])
            return len(text)

        file.write = write_in_halves  # type: ignore[method-assign]
        return file

    try:
        for name, function in real.items():
            setattr(os, name, wrap(function))
        os.fsync = wrap(
            lambda descriptor: None
        )  # only the order of calls is tested, so nothing is synced to disk
        builtins.open = io.open = open_counted  # type: ignore[assignment]
        yield
    finally:
        for name, function in real.items():
            setattr(os, name, function)
        builtins.open = io.open = real_open


def survives_kill(action: Step, root: Path, at: int) -> bool:
    """Run `action` in a process that dies at operation `at`; return True if the action finishes."""
    child = os.fork()
    if child == 0:

        def strike(count: int) -> None:
            if count == at:
                os.kill(os.getpid(), signal.SIGKILL)

        with sabotage(strike, MODIFY + DELETE):
            action(root)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL), f"{action} ended with status {status}"
    return status == 0


def drive(base: Path) -> None:
    """Kill a save at each operation k and keep `base/<scenario>/<k>`, until a save finishes."""
    for name, (setting, action) in SCENARIOS.items():
        before = base / name / "000"
        before.mkdir(parents=True)
        for step in setting:
            step(before)
        at, finished = 0, False
        while not finished:
            at += 1
            root = shutil.copytree(before, base / name / f"{at:03}")
            finished = survives_kill(action, root, at)


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    """Return an in-memory directory if possible, because the tests create over 10,000 files."""
    shared = "/dev/shm"
    with tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else None) as path:
        yield Path(path)


@pytest.fixture
def tmp_path(memory: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=memory))


@pytest.fixture(scope="module")
def wreckage(memory: Path) -> Path:
    base = memory / "wreckage"
    subprocess.run(
        [sys.executable, __file__, str(base)],
        check=True,
        stderr=subprocess.DEVNULL,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(Path(openrlhf.__file__).parents[1])},
    )
    return base


class Sorted:
    """A replacement for `os.scandir` that sorts by name, the least favorable order for deletion."""

    real = staticmethod(os.scandir)

    def __init__(self, path: Any = ".") -> None:
        with self.real(path) as entries:
            self.entries = iter(sorted(entries, key=lambda entry: entry.name))

    def __iter__(self) -> Iterator[os.DirEntry[str]]:
        return self.entries

    def __next__(self) -> os.DirEntry[str]:
        return next(self.entries)

    def __enter__(self) -> Sorted:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def killed(wreckage: Path, scenario: str) -> list[Path]:
    roots = sorted((wreckage / scenario).iterdir())[1:]
    assert len(roots) > 50, "the sabotage does not reach the file operations"
    return roots


def expect_tidy(manager: CheckpointManager) -> None:
    """Check that only the pointers, and the directories that manifests name, exist."""
    named = {place for checkpoint in manager.checkpoints() for place in checkpoint.places}
    there = {
        str(path.relative_to(manager.root))
        for pattern in ("*/", "_*/*/")
        for path in manager.root.glob(pattern)
        if path.name not in RL
    }
    assert there == named


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_save_killed_at_any_operation_leaves_the_old_or_the_new_checkpoint_intact(
    scenario: str, wreckage: Path, tmp_path: Path
) -> None:
    old = "old" if SCENARIOS[scenario][0] else None
    seen: list[str | None] = []
    for before in killed(wreckage, scenario):
        root = shutil.copytree(before, tmp_path / before.name)
        seen.append(newest_label(manager_of(root)))
        save(root, 9, "after")  # the run continues
        manager = manager_of(root)
        assert newest_label(manager) == "after"
        assert sum(not checkpoint.is_best for checkpoint in manager.checkpoints()) <= KEPT
        expect_tidy(manager)
    commit = seen.index("new")
    assert seen == [old] * commit + ["new"] * (len(seen) - commit)  # one operation commits
    assert 0 < commit < len(seen) - 1


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_recovery_can_be_repeated_after_a_kill_at_any_operation(
    scenario: str, wreckage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "scandir", Sorted)

    class Dead(BaseException):
        """The error that the fatal operation and all later operations raise, to simulate a kill."""

    for before in killed(wreckage, scenario)[::4]:
        labels: set[str | None] = set()
        at, finished = 0, False
        while not finished:
            at += 1
            root = shutil.copytree(before, tmp_path / before.name / str(at))

            def strike(count: int, fatal: int = at) -> None:
                if count >= fatal:
                    raise Dead

            with sabotage(strike, MODIFY + DELETE), suppress(Dead):
                manager_of(root).latest()
                finished = True
            labels.add(newest_label(manager_of(root)))
            expect_tidy(manager_of(root))
        assert len(labels) == 1, before.name


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("lasting", [False, True], ids=["for a moment", "for good"])
def test_full_disk_at_any_operation_loses_only_the_new_checkpoint(
    scenario: str, lasting: bool, tmp_path: Path
) -> None:
    setting, action = SCENARIOS[scenario]
    old = "old" if setting else None
    before = tmp_path / "before"
    before.mkdir()
    for step in setting:
        step(before)
    outcomes: list[bool] = []
    struck = True
    while struck:
        struck, at = False, len(outcomes) + 1
        root = shutil.copytree(before, tmp_path / str(at))

        def strike(count: int, first: int = at) -> None:
            nonlocal struck
            if count == first or (lasting and count > first):
                struck = True
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        saved = False
        with sabotage(strike, MODIFY), suppress(CheckpointError, RankError):
            action(root)
            saved = True
        outcomes.append(saved)
        if struck:
            assert newest_label(manager_of(root)) in ({"new"} if saved else {old, "new"})
            save(root, 9, "after")
            assert newest_label(manager_of(root)) == "after"
            expect_tidy(manager_of(root))
    assert True in outcomes and False in outcomes and len(outcomes) > 20


def test_full_disk_error_names_the_path_and_the_older_checkpoints(
    tmp_path: Path,
) -> None:
    manager = manager_of(tmp_path)
    save(manager, 1, "old")
    staged = manager.begin(2)
    for place in staged.places:
        (staged.directory / place / "weights").write_text("new")

    def strike(count: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with (
        sabotage(strike, MODIFY),
        pytest.raises(CheckpointError, match=r"--ckpt\.path .*No space left.*global_step1"),
    ):
        manager.commit(staged, state=RunState(step=2))
    assert newest_label(manager) == "old"


def test_failed_save_frees_its_disk_space_immediately(tmp_path: Path) -> None:
    manager = manager_of(tmp_path)
    staged = manager.begin(1)
    for place in staged.places:
        (staged.directory / place / "weights").write_text("new")

    def strike(count: int) -> None:
        if count == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with sabotage(strike, MODIFY), pytest.raises(CheckpointError):
        manager.commit(staged, state=RunState(step=1))
    assert list(tmp_path.iterdir()) == []


def test_save_syncs_all_files_before_the_commit_and_commits_before_older_checkpoints_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1, "a")
    save(tmp_path, 2, "b")
    events: list[tuple[str, str]] = []

    def record(name: str, describe: Callable[..., str]) -> None:
        real = getattr(os, name)

        def recorded(*arguments: Any, **keywords: Any) -> Any:
            events.append((name, describe(*arguments)))
            return real(*arguments, **keywords)

        monkeypatch.setattr(os, name, recorded)

    record("fsync", lambda descriptor: os.readlink(f"/proc/self/fd/{descriptor}"))
    record("rename", lambda source, target: str(target))
    record("unlink", lambda path, **_: str(path))
    save(tmp_path, 3, "new")
    commit = events.index(("rename", str(tmp_path / f"global_step3{MANIFEST}")))
    synced = [path for name, path in events[:commit] if name == "fsync"]
    (newest, *_) = [c for c in manager_of(tmp_path).checkpoints() if c.tag == "global_step3"]
    staged = [path for path in synced if path.endswith("global_step3/weights")]
    assert len(staged) == len(newest.parts)
    for path in newest.files:
        assert any(name.endswith((path, f"{path}.new")) and "/.tmp-" in name for name in synced)
    for place in newest.places:
        installed = events.index(("rename", str(tmp_path / place)))
        assert ("fsync", str((tmp_path / place).parent)) in events[installed:commit]
        assert any(path.endswith(place) and "/.tmp-" in path for path in synced)
    evicted = next(
        n
        for n, (name, path) in enumerate(events)
        if name == "rename" and path.endswith(f"/global_step2{MANIFEST}")
    )
    assert ("fsync", str(tmp_path)) in events[commit:evicted]
    assert ("unlink", "weights") not in events[:evicted]
    deleted = events.index(("unlink", "weights"), evicted)
    assert ("fsync", str(tmp_path)) in events[evicted:deleted]


if __name__ == "__main__":
    os.fsync = lambda descriptor: None
    drive(Path(sys.argv[1]))
