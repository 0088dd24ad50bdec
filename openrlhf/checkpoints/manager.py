"""Which checkpoints are kept, and how one is written so that a kill loses at most the save under
way.

    <ckpt.path>/global_step20.manifest.json  the commit point: files, sizes, hashes, run state
    <ckpt.path>/_actor/global_step20/…       engine files and metric.json  (offline: no `_actor/`)
    <ckpt.path>/_actor/latest                the newest tag, for DeepSpeed's own tools
    <ckpt.path>/global_step20_hf/…           the optional export
    <ckpt.path>/.tmp-<tag>-<nonce>           a save or a removal under way, laid out as above

A save is written aside, synced and hashed, renamed into place, and committed by the rename of its
manifest; only then are older checkpoints removed. A checkpoint is removed the same way backwards:
the rename of its manifest aside takes the commit back, its directories follow, and all of it is
deleted. A directory that no manifest names is no checkpoint: what our own saves left aside is
deleted, and what other programs wrote stays.

Standard library only. One process (rank 0, the controller) owns the manager and makes one save at a
time. `<ckpt.path>` is on one file system that all processes see.
"""

import errno
import glob
import json
import logging
import math
import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from openrlhf.checkpoints.manifest import Checkpoint, CheckpointError, RunState, StagedCheckpoint
from openrlhf.config.shared import CheckpointConfig
from openrlhf.files import disk_of, fingerprint, move, sync, sync_tree, write_atomically

logger = logging.getLogger(__name__)
WITHOUT = "The run continues without a checkpoint of step {}: {}"
GOES_ON = "Step {} is saved: --ckpt.load_enable continues from it."
NOTHING_SAVED = "No step is saved."
HOW_TO_SAVE = " With --ckpt.save_steps, an interrupted run saves its last step."

GIB = 2**30
FULL = 2**20  # bytes: with less than this free a disk counts as full
MANIFEST = ".manifest.json"
TORCH_CANNOT_WRITE = (
    "PytorchStreamWriter",
    "file write failed",
    "unexpected pos",
)  # in its RuntimeErrors


def note_of_end(ckpt: CheckpointConfig, *, saved: int, step: int) -> str:
    """Return what a run interrupted after `step` prints about its newest checkpoint, `saved`; "" if
    nothing is lost.
    """
    if step < 1:
        return ""
    if ckpt.resumable and saved > 0:
        return GOES_ON.format(saved)
    return NOTHING_SAVED if ckpt.saves else NOTHING_SAVED + HOW_TO_SAVE


class CheckpointManager:
    """Writes, finds and removes the checkpoints under `root` (`--ckpt.path`).

    `parts`: the engines that a checkpoint consists of, none with --ckpt.disable_ds. --ckpt.max_num
    limits the regular checkpoints, --ckpt.max_mem the GiB of all checkpoints; both count the
    newest.
    """

    def __init__(self, ckpt: CheckpointConfig, parts: Sequence[str] = ("",)) -> None:
        self.root = Path(ckpt.path).absolute()
        if glob.has_magic(str(self.root)):
            raise CheckpointError(
                f"--ckpt.path {self.root}: DeepSpeed takes paths as patterns and would not find its files again under a "
                "name with [, * or ?. Choose another --ckpt.path."
            )
        self.parts = () if ckpt.disable_ds else tuple(parts)
        self.max_num, self.max_bytes = ckpt.max_num, ckpt.max_mem * GIB
        self._damaged: set[str] = set()  # nonces of what `latest` found incomplete

    def latest(self) -> Checkpoint | None:
        """The newest complete checkpoint, regular or best, with all its files checked; None, with a
        warning, if there is none.

        An incomplete checkpoint is passed over with a warning that says what is wrong. Raises
        CheckpointError if the newest complete one lacks an engine that this run has.
        """
        self._settle()
        for checkpoint in reversed(self.checkpoints()):
            tag = checkpoint.tag
            if not checkpoint.parts:
                logger.warning("%s in %s is only an export: passed over.", tag, self.root)
            elif damage := checkpoint.damage():
                self._damaged.add(checkpoint.nonce)
                logger.warning("%s in %s is incomplete: passed over; %s.", tag, self.root, damage)
            elif missing := set(self.parts) - set(checkpoint.parts):
                raise CheckpointError(
                    f"{tag} in --ckpt.path {self.root} has the engines {list(checkpoint.parts)},"
                    f" but this run also needs {sorted(missing)}. Choose another --ckpt.path, or"
                    " leave out --ckpt.load_enable."
                )
            else:
                return checkpoint
        logger.warning(
            "No complete checkpoint in --ckpt.path %s: the run starts from the beginning.",
            self.root,
        )
        return None

    def find(self, step: int, *, best: bool) -> Checkpoint | None:
        """The complete checkpoint of a step, regular or best, all files checked; None without one."""
        found = [
            checkpoint
            for checkpoint in self.checkpoints()
            if checkpoint.tag == _tag(step, best=best)
        ]
        return found[0] if found and not found[0].damage() else None

    def checkpoints(self) -> list[Checkpoint]:
        """Every committed checkpoint, oldest save first, its files unchecked.

        A damaged manifest is renamed with a warning, and its checkpoint does not count.
        """
        found: list[Checkpoint] = []
        for path in sorted(self.root.glob(f"*{MANIFEST}")):
            try:
                found.append(Checkpoint.read(path, root=self.root))
            except ValueError as error:
                logger.warning("%s is damaged: renamed to *.damaged; %s.", path, error)
                os.rename(path, f"{path}.damaged")
        return sorted(found, key=lambda checkpoint: checkpoint.sequence)

    def begin(self, step: int, *, best: bool = False, hf: bool = False) -> StagedCheckpoint:
        """Make the directories of a save; `hf` announces an export.

        Gives up an earlier save that was not committed. Raises CheckpointError if the disk has less
        room than the last checkpoint took, or cannot be written.
        """
        tag, nonce = _tag(step, best=best), os.urandom(4).hex()
        places = [str(Path(part, tag)) for part in self.parts] + [f"{tag}_hf"] * hf
        directory = self.root / _aside_name(tag, nonce)
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._settle()
            self._check_space()
            for place in places:
                (directory / place).mkdir(parents=True)
        except OSError as error:
            raise self._failed(tag, error) from error
        return StagedCheckpoint(directory=directory, tag=tag, nonce=nonce, places=tuple(places))

    def commit(
        self, staged: StagedCheckpoint, *, state: RunState, metric_value: float | None = None
    ) -> Checkpoint:
        """Make a save whose files are all written the newest checkpoint, and remove older ones
        beyond the limits.

        `metric_value`: of the metric that the run follows, for these weights. A value that is not
        finite counts as none. Raises CheckpointError if the save fails, and gives the save up;
        trouble with older checkpoints is only a warning.
        """
        assert staged.tag.endswith(_tag(state.step))
        if metric_value is not None and not math.isfinite(metric_value):
            metric_value = None
        try:
            checkpoint = self._seal(staged, state, metric_value)
            self._install(staged, checkpoint)
        except OSError as error:
            with suppress(OSError):  # what is left is settled by the next call
                self._settle()
            raise self._failed(staged.tag, error) from error
        try:
            _remove(staged.directory)
            for part in self.parts:
                write_atomically(self.root / part / "latest", checkpoint.tag)
            self._rotate(checkpoint.state.run_dir)
        except OSError as error:
            logger.warning("%s is saved; tidying up %s failed: %s.", staged.tag, self.root, error)
        return checkpoint

    @contextmanager
    def writing(self, staged: StagedCheckpoint) -> Iterator[None]:
        """Raise CheckpointError if the files of the block cannot be written, in any process.

        Files written so far are removed, because later checkpoints and the final model need the
        space.
        """
        try:
            yield
        except Exception as error:
            reason = self._why_unwritten(error)
            if reason is None:
                raise
            shutil.rmtree(staged.directory, ignore_errors=True)
            raise self._failed(staged.tag, reason) from error

    def _why_unwritten(self, error: Exception) -> OSError | None:
        """Return why files could not be written; None if the error has another reason.

        torch raises a RuntimeError, which does not say why: a full disk, a quota, or a limit on the
        size of files. An export raises an OSError.
        """
        if isinstance(error, OSError):
            return error
        if shutil.disk_usage(self.root).free <= FULL:
            return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if isinstance(error, RuntimeError) and any(
            words in str(error) for words in TORCH_CANNOT_WRITE
        ):
            return OSError(str(error).splitlines()[0])
        return None

    def _failed(self, tag: str, error: OSError) -> CheckpointError:
        older = [checkpoint.tag for checkpoint in self.checkpoints()]
        standing = (
            f"Older checkpoints are kept: {', '.join(older)}."
            if older
            else "There is no older one."
        )
        return CheckpointError(
            f"{tag} could not be written to --ckpt.path {self.root}: {error}. {standing} Make room, choose another "
            f"--ckpt.path, or keep fewer with --ckpt.max_num (now {self.max_num})."
        )

    def _seal(
        self, staged: StagedCheckpoint, state: RunState, metric_value: float | None
    ) -> Checkpoint:
        """Sync and hash the staged files, and write the draft of the manifest beside them."""
        files: dict[str, tuple[int, str]] = {}
        for directory in (staged.directory / place for place in staged.places):
            if not any(directory.iterdir()):
                raise FileNotFoundError(f"nothing was written into {directory}")
            if not directory.name.endswith("_hf"):
                metric = {"metric_key": state.best_metric_key, "metric_value": metric_value}
                write_atomically(directory / "metric.json", json.dumps(metric))
            for path in sync_tree(directory):
                name = str(path.relative_to(staged.directory))
                files[name] = (path.stat().st_size, fingerprint(path))
        checkpoint = Checkpoint(
            directory=self.root,
            tag=staged.tag,
            nonce=staged.nonce,
            sequence=max((other.sequence for other in self.checkpoints()), default=0) + 1,
            places=staged.places,
            files=files,
            metric_key=state.best_metric_key,
            metric_value=metric_value,
            state=state,
        )
        write_atomically(staged.directory / (staged.tag + MANIFEST), checkpoint.manifest())
        return checkpoint

    def _install(self, staged: StagedCheckpoint, checkpoint: Checkpoint) -> None:
        """Rename the staged directories into place, and then the manifest: the commit."""
        for other in self.checkpoints():
            aside = self.root / _aside_name(other.tag, other.nonce)
            for place in other.places if other.tag == checkpoint.tag else ():
                if (
                    self.root / place
                ).exists():  # `_settle` brings it back as long as its manifest stands
                    move(self.root / place, aside / place)
        for place in checkpoint.places:
            if (self.root / place).exists():  # no manifest names it: not ours to delete
                logger.warning("%s is in the way: renamed to %s.%s.", place, place, staged.nonce)
                move(self.root / place, self.root / f"{place}.{staged.nonce}")
            move(staged.directory / place, self.root / place)
        move(staged.directory / (staged.tag + MANIFEST), self.root / (staged.tag + MANIFEST))

    def _rotate(self, run_dir: str) -> None:
        """Remove what exceeds the limits, of the checkpoints that a run has written. Those of other
        runs stay.
        """
        own = [
            checkpoint for checkpoint in self.checkpoints() if checkpoint.state.run_dir == run_dir
        ]
        evicted = evictions(
            own, max_num=self.max_num, max_bytes=self.max_bytes, damaged=self._damaged
        )
        for (
            checkpoint
        ) in evicted:  # with its manifest aside, a checkpoint is a save that was not committed
            manifest = checkpoint.tag + MANIFEST
            move(
                self.root / manifest,
                self.root / _aside_name(checkpoint.tag, checkpoint.nonce) / manifest,
            )
        self._settle()
        size = sum(checkpoint.size for checkpoint in self.checkpoints())
        if size > self.max_bytes:
            text = "The checkpoints that must stay in %s take %.4g GiB, more than --ckpt.max_mem %g GiB."
            logger.warning(text, self.root, size / GIB, self.max_bytes / GIB)

    def _settle(self) -> None:
        """Take back saves and removals that were not committed, and delete what the others left.

        A draft of a manifest aside was not committed: what is in place already moves back aside,
        and the draft goes before the rest, so that this too can be killed and repeated. Then what a
        standing manifest names comes back.
        """
        asides = sorted(self.root.glob(".tmp-*"))
        for aside in asides:
            for draft in aside.glob(f"*{MANIFEST}"):
                with suppress(ValueError):  # damaged: nothing can be told from it
                    for place in Checkpoint.read(draft, root=self.root).places:
                        if not (aside / place).exists() and (self.root / place).exists():
                            move(self.root / place, aside / place)
                draft.unlink()
                sync(aside)
        standing = {
            _aside_name(checkpoint.tag, checkpoint.nonce): checkpoint
            for checkpoint in self.checkpoints()
        }
        for aside in asides:
            for place in standing[aside.name].places if aside.name in standing else ():
                if (aside / place).exists():
                    move(aside / place, self.root / place)
            _remove(aside)

    def check_room(self, size: int) -> list[str]:
        """Check that the disk has room for checkpoints of about `size` bytes. Return notices for
        the user.

        Raises CheckpointError if not even one checkpoint fits.
        """
        disk = disk_of(self.root)
        if not disk.total:
            return []
        one, free = f"about {size / GIB:.3g} GiB", f"{disk.free / GIB:.3g} GiB"
        if disk.free < size:
            raise CheckpointError(
                f"--ckpt.path {self.root} has {free} free, but a checkpoint of this run takes {one}. Make room, choose "
                "another --ckpt.path, or write no checkpoints (--ckpt.save_steps -1)."
            )
        kept = sum(
            checkpoint.size for checkpoint in self.checkpoints()
        )  # they make room for new ones
        needed = min((self.max_num + 1) * size, self.max_bytes + size)
        if disk.free + kept >= needed:
            return []
        return [
            f"--ckpt.path {self.root} has {free} free: too little for --ckpt.max_num {self.max_num} checkpoints of "
            f"{one} each and one more, which is written before the oldest is removed ({needed / GIB:.3g} GiB). The run "
            "continues without the checkpoints that do not fit. Lower --ckpt.max_num, or make room."
        ]

    def _check_space(self) -> None:
        """Raise OSError if the disk has less room than the last checkpoint took."""
        needed = sum(checkpoint.size for checkpoint in self.checkpoints()[-1:])
        free = shutil.disk_usage(self.root).free
        if free < needed:
            raise OSError(
                errno.ENOSPC,
                f"the last checkpoint took {needed / GIB:.4g} GiB, and {free / GIB:.4g} GiB are free",
            )


def evictions(
    checkpoints: Sequence[Checkpoint],
    *,
    max_num: int,
    max_bytes: float,
    damaged: Collection[str] = (),
) -> list[Checkpoint]:
    """Which of `checkpoints` (oldest first) to remove: all best ones but the last, then regular
    ones.

    While the others exceed a limit, regular ones go in this order: damaged ones (their nonces are
    in `damaged`), those without a metric, those with the worst metric, the oldest. The newest of
    all and the last best one always stay.
    """
    evicted = [checkpoint for checkpoint in checkpoints if checkpoint.is_best][:-1]
    number = sum(not checkpoint.is_best for checkpoint in checkpoints)
    size = sum(checkpoint.size for checkpoint in checkpoints if checkpoint not in evicted)

    def rank(checkpoint: Checkpoint) -> tuple[bool, bool, float, int]:
        worth = checkpoint.worth
        return checkpoint.nonce not in damaged, worth is not None, worth or 0.0, checkpoint.sequence

    for checkpoint in sorted(checkpoints[:-1], key=rank):
        if not checkpoint.is_best and (number > max_num or size > max_bytes):
            evicted.append(checkpoint)
            number, size = number - 1, size - checkpoint.size
    return evicted


def _tag(step: int, *, best: bool = False) -> str:
    return f"{'best_' if best else ''}global_step{step}"


def _aside_name(tag: str, nonce: str) -> str:
    return f".tmp-{tag}-{nonce}"


def _remove(directory: Path) -> None:
    """Delete a directory; what cannot be deleted now is swept by a later call."""
    try:
        shutil.rmtree(directory)
    except OSError as error:
        logger.warning("%s could not be removed: %s.", directory, error)
