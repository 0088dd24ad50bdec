"""Writes, finds and removes checkpoints. A kill loses at most the save in progress.

    <ckpt.path>/global_step20.manifest.json  the commit point: files, sizes, hashes, run state
    <ckpt.path>/_actor/global_step20/…       engine files and metric.json  (offline: no `_actor/`)
    <ckpt.path>/_actor/latest                the newest tag, for DeepSpeed's own tools
    <ckpt.path>/global_step20_hf/…           the optional export
    <ckpt.path>/.tmp-<tag>-<nonce>           a save or a removal in progress, laid out as above

A save is written to a temporary directory, synced and hashed, renamed into place, and committed by
renaming its manifest; only then are older checkpoints removed. Removal runs in reverse: renaming
the manifest into a temporary directory revokes the commit, the checkpoint's directories follow, and
the temporary directory is deleted. A directory that no manifest names is not a checkpoint:
leftovers of this program's saves are deleted, and files of other programs are kept. If both the
best and the regular checkpoint of a step are due, their engine files are the same files on disk.

Only the standard library is used. One process (rank 0, the controller) owns the manager and makes
one save at a time. `<ckpt.path>` is on a single file system that all processes can access.
"""

import errno
import glob
import json
import math
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from openrlhf.checkpoints.manifest import Checkpoint, CheckpointError, RunState, StagedCheckpoint
from openrlhf.checks import Finding
from openrlhf.config.shared import CheckpointConfig
from openrlhf.files import disk_of, fingerprint, move, sync, sync_tree, write_atomically
from openrlhf.reporting import warn
from openrlhf.units import GIB, MIB, in_gib

SAVE_FAILED = "The run continues without a checkpoint for step {}: {}"
RESUME_HINT = "Saved step {}. Resume with --ckpt.load_enable."
NOTHING_SAVED = "No step was saved."
HOW_TO_SAVE = " With --ckpt.save_steps, an interrupted run saves its last step."

FULL = MIB  # in bytes; a disk with no more free space than this counts as full
MANIFEST = ".manifest.json"
# Substrings of the RuntimeErrors that torch raises when it cannot write a file.
TORCH_WRITE_ERRORS = ("PytorchStreamWriter", "file write failed", "unexpected pos")


def note_of_end(ckpt: CheckpointConfig, *, saved: int, step: int) -> str:
    """Return the final message of an interrupted run, or "" if nothing is lost.

    The run was interrupted after `step`, and its newest checkpoint is from step `saved`.
    """
    if step < 1:
        return ""
    if ckpt.resumable and saved > 0:
        return RESUME_HINT.format(saved)
    if ckpt.saves:
        return NOTHING_SAVED
    return NOTHING_SAVED + HOW_TO_SAVE


class CheckpointManager:
    """The owner of the checkpoints under `root` (`--ckpt.path`): writes, finds and removes them.

    `parts` are the engines in a checkpoint (none with --ckpt.disable_ds). --ckpt.max_num limits the
    number of regular checkpoints, and --ckpt.max_mem limits the size of all checkpoints in GiB;
    both include the newest checkpoint. Files that two checkpoints share count once.
    """

    def __init__(self, ckpt: CheckpointConfig, parts: Sequence[str] = ("",)) -> None:
        self.root = Path(ckpt.path).absolute()
        if glob.has_magic(str(self.root)):
            raise CheckpointError(
                f"--ckpt.path {self.root} contains [, * or ?. DeepSpeed treats paths as patterns "
                "and could not find its files again. Choose a different --ckpt.path."
            )
        self.parts: tuple[str, ...] = ()
        if not ckpt.disable_ds:
            self.parts = tuple(parts)
        self.max_num = ckpt.max_num
        self.max_bytes = ckpt.max_mem * GIB
        # Nonces of checkpoints that `latest` found to be incomplete.
        self._damaged: set[str] = set()
        self._best: Checkpoint | None = None  # newest best checkpoint that this manager committed

    def latest(self) -> Checkpoint | None:
        """Return the newest complete checkpoint, regular or best, after checking all its files.

        Skip incomplete checkpoints with a warning that names the damaged file. Return None, with a
        warning, if no checkpoint is complete. Raises CheckpointError if the newest complete
        checkpoint lacks an engine that this run needs.
        """
        self._settle()
        for checkpoint in reversed(self.checkpoints()):
            tag = checkpoint.tag
            damage = checkpoint.damage()
            if damage:
                self._damaged.add(checkpoint.nonce)
                damage = f"it is incomplete: {damage}"
            elif not checkpoint.parts:
                damage = "it contains only an export"
            if damage:
                warn(f"Skipped {tag} in {self.root}: {damage}.")
                continue
            missing = set(self.parts) - set(checkpoint.parts)
            if missing:
                raise CheckpointError(
                    f"{tag} in --ckpt.path {self.root} has the engines {list(checkpoint.parts)}, "
                    f"but this run also needs {sorted(missing)}. Choose a different --ckpt.path, "
                    "or drop --ckpt.load_enable."
                )
            return checkpoint
        warn(
            f"No complete checkpoint in --ckpt.path {self.root}: the run starts from the beginning."
        )
        return None

    def find(self, step: int, *, best: bool) -> Checkpoint | None:
        """Return a step's regular or best checkpoint, or None if it is missing or incomplete."""
        for checkpoint in self.checkpoints():
            if checkpoint.tag == _tag(step, best=best) and not checkpoint.damage():
                return checkpoint
        return None

    def checkpoints(self) -> list[Checkpoint]:
        """Return all committed checkpoints, oldest save first, without checking their files.

        Skip a checkpoint whose manifest is damaged: rename the manifest and log a warning.
        """
        found: list[Checkpoint] = []
        for path in sorted(self.root.glob(f"*{MANIFEST}")):
            try:
                found.append(Checkpoint.read(path, root=self.root))
            except ValueError as error:
                warn(f"{path} is damaged ({error}): renamed to *.damaged.")
                os.rename(path, f"{path}.damaged")
        return sorted(found, key=lambda checkpoint: checkpoint.sequence)

    def begin(self, step: int, *, best: bool = False, hf: bool = False) -> StagedCheckpoint:
        """Create the directories for a save, including one for an export if `hf` is true.

        Discard any earlier save that was not committed. Raises CheckpointError if the disk is not
        writable, or has less free space than the last checkpoint took.
        """
        tag = _tag(step, best=best)
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._settle()
            self._check_space()
            return self._stage(tag, hf=hf)
        except OSError as error:
            raise self._failed(tag, error) from error

    def _stage(self, tag: str, *, hf: bool) -> StagedCheckpoint:
        """Create the temporary directories for a save."""
        nonce = os.urandom(4).hex()
        places = [str(Path(part, tag)) for part in self.parts]
        if hf:
            places.append(f"{tag}_hf")
        directory = self.root / _aside_name(tag, nonce)
        for place in places:
            (directory / place).mkdir(parents=True)
        return StagedCheckpoint(directory=directory, tag=tag, nonce=nonce, places=tuple(places))

    def save_linked(self, step: int) -> Checkpoint | None:
        """Commit a regular checkpoint that shares the engine files of the same step's best one.

        The files are hard links, so either checkpoint can be removed without the other. An export
        is copied, because users may edit it. Returns None if this manager's newest best checkpoint
        is from a different step, or if the checkpoint could not be saved in this way, for example
        because the file system has no hard links.
        """
        best = self._best
        if best is None or best.state.step != step:
            return None
        try:
            self._settle()
            staged = self._stage(_tag(step), hf=Path(best.hf_dir).name in best.places)
            for source, target in zip(best.places, staged.places, strict=True):
                copy: Callable[[str, str], object] = os.link
                if source.endswith("_hf"):
                    copy = shutil.copy2
                shutil.copytree(
                    self.root / source,
                    staged.directory / target,
                    copy_function=copy,
                    dirs_exist_ok=True,
                )
            return self.commit(staged, state=best.state, metric_value=best.metric_value)
        except (OSError, CheckpointError):
            with suppress(OSError):  # the next call removes the rest
                self._settle()
            return None

    def commit(
        self, staged: StagedCheckpoint, *, state: RunState, metric_value: float | None = None
    ) -> Checkpoint:
        """Commit a save whose files are all written, then enforce the limits on older checkpoints.

        `metric_value` is the value of the run's best-model metric for these weights. A non-finite
        value counts as None. If the save fails, discards it and raises CheckpointError; a failure
        to remove older checkpoints only causes a warning.
        """
        assert staged.tag.endswith(_tag(state.step))
        if metric_value is not None and not math.isfinite(metric_value):
            metric_value = None
        try:
            checkpoint = self._seal(staged, state, metric_value)
            self._install(staged, checkpoint)
        except OSError as error:
            with suppress(OSError):  # the next call removes the rest
                self._settle()
            raise self._failed(staged.tag, error) from error
        if checkpoint.is_best:
            self._best = checkpoint
        try:
            _remove(staged.directory)
            for part in self.parts:
                write_atomically(self.root / part / "latest", checkpoint.tag)
            self._rotate(checkpoint.state.run_dir)
        except OSError as error:
            warn(
                f"Saved {staged.tag}, but failed to remove older checkpoints in {self.root}: "
                f"{error}."
            )
        return checkpoint

    @contextmanager
    def writing(self, staged: StagedCheckpoint) -> Iterator[None]:
        """Raise CheckpointError if the block fails to write its files in any process.

        Remove the files written so far, because later checkpoints and the final model need the
        space.
        """
        try:
            yield
        except Exception as error:
            reason = str(error).partition("\n")[0]
            if not isinstance(error, OSError):
                # On a full disk or quota, torch raises a RuntimeError without the cause.
                if shutil.disk_usage(self.root).free <= FULL:
                    reason = os.strerror(errno.ENOSPC)
                elif not any(words in reason for words in TORCH_WRITE_ERRORS):
                    raise
            shutil.rmtree(staged.directory, ignore_errors=True)
            raise self._failed(staged.tag, reason) from error

    def _failed(self, tag: str, reason: object) -> CheckpointError:
        older = ", ".join(checkpoint.tag for checkpoint in self.checkpoints())
        return CheckpointError(
            f"{tag} could not be written to --ckpt.path {self.root}: {reason}. Older checkpoints "
            f"are kept: {older or 'none'}. Free some disk space, choose a different --ckpt.path, "
            f"or lower --ckpt.max_num (now {self.max_num})."
        )

    def _seal(
        self, staged: StagedCheckpoint, state: RunState, metric_value: float | None
    ) -> Checkpoint:
        """Sync and hash the staged files, and write the draft manifest next to them."""
        files: dict[str, tuple[int, str]] = {}
        for place in staged.places:
            directory = staged.directory / place
            if not any(directory.iterdir()):
                raise FileNotFoundError(f"nothing was written to {directory}")
            if not directory.name.endswith("_hf"):
                metric = {"metric_key": state.best_metric_key, "metric_value": metric_value}
                write_atomically(directory / "metric.json", json.dumps(metric))
            for path in sync_tree(directory):
                name = str(path.relative_to(staged.directory))
                files[name] = (path.stat().st_size, fingerprint(path))
        sequence = max((committed.sequence for committed in self.checkpoints()), default=0) + 1
        checkpoint = Checkpoint(
            directory=self.root,
            tag=staged.tag,
            nonce=staged.nonce,
            sequence=sequence,
            places=staged.places,
            files=files,
            metric_key=state.best_metric_key,
            metric_value=metric_value,
            state=state,
        )
        write_atomically(staged.directory / (staged.tag + MANIFEST), checkpoint.manifest())
        return checkpoint

    def _install(self, staged: StagedCheckpoint, checkpoint: Checkpoint) -> None:
        """Rename the staged directories into place, then commit by renaming the manifest."""
        for other in self.checkpoints():
            if other.tag == checkpoint.tag:
                # If this save is not committed, `_settle` moves the files back.
                _move(other.places, self.root, self._aside(other))
        for place in checkpoint.places:
            # no manifest names this directory, so it may belong to another program
            if (self.root / place).exists():
                warn(
                    f"{place} already exists but does not belong to a checkpoint. Renamed it to "
                    f"{place}.{staged.nonce}."
                )
                move(self.root / place, self.root / f"{place}.{staged.nonce}")
            move(staged.directory / place, self.root / place)
        move(staged.directory / (staged.tag + MANIFEST), self.root / (staged.tag + MANIFEST))

    def _rotate(self, run_dir: str) -> None:
        """Remove checkpoints that exceed the limits, but keep checkpoints written by other runs."""
        own = [
            checkpoint for checkpoint in self.checkpoints() if checkpoint.state.run_dir == run_dir
        ]
        evicted = evictions(
            own, max_num=self.max_num, max_bytes=self.max_bytes, damaged=self._damaged
        )
        for checkpoint in evicted:
            # `_settle` deletes the files of a checkpoint without a manifest.
            manifest = checkpoint.tag + MANIFEST
            move(self.root / manifest, self._aside(checkpoint) / manifest)
        self._settle()
        size = _total_size(map(_files_of, self.checkpoints()))
        if size > self.max_bytes:
            warn(
                f"The checkpoints that must be kept in {self.root} take {in_gib(size, 4)}, more "
                f"than --ckpt.max_mem {in_gib(self.max_bytes, 6)}."
            )

    def _settle(self) -> None:
        """Undo uncommitted saves and removals, and delete their files.

        An uncommitted draft's files are moved out of place, and the draft is deleted before the
        files, so that this method can be repeated if it is killed. Then restore the files of
        committed checkpoints.
        """
        asides = sorted(self.root.glob(".tmp-*"))
        for aside in asides:
            self._roll_back(aside)
        committed = {self._aside(checkpoint): checkpoint for checkpoint in self.checkpoints()}
        for aside in asides:
            if aside in committed:
                _move(committed[aside].places, aside, self.root)
            _remove(aside)

    def _roll_back(self, aside: Path) -> None:
        """Move the files of uncommitted manifests back to `aside`, and delete the manifests."""
        for draft in aside.glob(f"*{MANIFEST}"):
            with suppress(ValueError):  # the files of a damaged manifest are unknown
                places = Checkpoint.read(draft, root=self.root).places
                _move([place for place in places if not (aside / place).exists()], self.root, aside)
            draft.unlink()
            sync(aside)

    def _aside(self, checkpoint: StagedCheckpoint) -> Path:
        """Return the temporary directory for a checkpoint's files during saves and removals."""
        return self.root / _aside_name(checkpoint.tag, checkpoint.nonce)

    def check_room(self, size: int) -> list[Finding]:
        """Return a finding if the disk is too small for checkpoints of about `size` bytes.

        The finding is a failure if not even one checkpoint fits.
        """
        disk = disk_of(self.root)
        # The files of kept checkpoints are removed as new checkpoints are written.
        files_kept = map(_files_of, self.checkpoints())
        kept = _total_size(files_kept)
        needed = min((self.max_num + 1) * size, self.max_bytes + size)
        fails = disk.free < size
        if not disk.total or not (fails or disk.free + kept < needed):
            return []
        seen = (
            f"--ckpt.path {self.root} has {in_gib(disk.free)} free. A checkpoint of this run "
            f"takes about {in_gib(size)}, and --ckpt.max_num {self.max_num} checkpoints plus "
            f"one that is written before the oldest is removed take {in_gib(needed)}."
        )
        fix = (
            "Free some disk space, lower --ckpt.max_num, choose a different --ckpt.path, or write "
            "no checkpoints (--ckpt.save_steps -1)."
        )
        if not fails:
            seen += " The run continues without the checkpoints that do not fit."
        return [Finding(seen, fix, fails=fails)]

    def _check_space(self) -> None:
        """Raise OSError if the disk has less free space than the last checkpoint took."""
        checkpoints = self.checkpoints()
        if not checkpoints:
            return
        needed = checkpoints[-1].size
        free = shutil.disk_usage(self.root).free
        if free < needed:
            raise OSError(
                errno.ENOSPC,
                f"the last checkpoint took {in_gib(needed, 4)}, but only {in_gib(free, 4)} are "
                "free",
            )


def evictions(
    checkpoints: Sequence[Checkpoint],
    *,
    max_num: int,
    max_bytes: float,
    damaged: Collection[str] = (),
) -> list[Checkpoint]:
    """Return which of `checkpoints` (oldest first) to remove.

    All best checkpoints except the most recent one are removed. While the remaining checkpoints
    exceed a limit, regular checkpoints are removed in this order: damaged checkpoints (whose nonces
    are in `damaged`), checkpoints without a metric, and finally all others, starting with the worst
    metric. Among equals, the oldest checkpoint is removed first. The newest checkpoint and the most
    recent best checkpoint are always kept. Removing a checkpoint does not free files that a kept
    checkpoint shares.
    """
    evicted = [checkpoint for checkpoint in checkpoints if checkpoint.is_best][:-1]
    number = sum(not checkpoint.is_best for checkpoint in checkpoints)
    # Look up each file only once, because a shared file system may take milliseconds per file.
    files = {each.nonce: _files_of(each) for each in checkpoints if each not in evicted}

    def rank(checkpoint: Checkpoint) -> tuple[bool, bool, float, int]:
        worth = checkpoint.worth
        return checkpoint.nonce not in damaged, worth is not None, worth or 0.0, checkpoint.sequence

    for checkpoint in sorted(checkpoints[:-1], key=rank):
        if not checkpoint.is_best and (number > max_num or _total_size(files.values()) > max_bytes):
            evicted.append(checkpoint)
            del files[checkpoint.nonce]
            number -= 1
    return evicted


# Identifies a file on disk, whatever its path; the path of a missing file identifies itself.
FileKey = Path | tuple[int, int]


def _files_of(checkpoint: Checkpoint) -> dict[FileKey, int]:
    """Return the sizes in bytes of a checkpoint's files. Hard links to one file have one key."""
    sizes: dict[FileKey, int] = {}
    for name, (size, _) in checkpoint.files.items():
        path = checkpoint.directory / name
        key: FileKey = path
        with suppress(OSError):  # a missing file
            found = path.stat()
            key = (found.st_dev, found.st_ino)
        sizes[key] = size
    return sizes


def _total_size(files: Iterable[Mapping[FileKey, int]]) -> int:
    """Return the total size in bytes of several checkpoints' files. A shared file counts once."""
    merged: dict[FileKey, int] = {}
    for sizes in files:
        merged |= sizes
    return sum(merged.values())


def _tag(step: int, *, best: bool = False) -> str:
    if best:
        return f"best_global_step{step}"
    return f"global_step{step}"


def _aside_name(tag: str, nonce: str) -> str:
    return f".tmp-{tag}-{nonce}"


def _move(places: Iterable[str], source: Path, target: Path) -> None:
    """Move each directory that exists in `source` to `target`."""
    for place in places:
        if (source / place).exists():
            move(source / place, target / place)


def _remove(directory: Path) -> None:
    """Delete a directory. A later call retries files that cannot be deleted now."""
    try:
        shutil.rmtree(directory)
    except OSError as error:
        warn(f"Could not remove {directory}: {error}.")
