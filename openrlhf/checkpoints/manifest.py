"""What a checkpoint is: its files, the state of the run, and the manifest that makes both count.

Standard library only.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from openrlhf.config.flags import UserError, notice
from openrlhf.data.first_start import FirstStart, now
from openrlhf.files import fingerprint

FORMAT = 1
CONVERTS = "--ds.use_universal_ckpt allows another number of processes, ZeRO 1 after 2, and 2 after 1: no more."
MINIMISED = (
    "loss",
    "truncated_rate",
    "failed_episodes",
)  # ends of the names of metrics of which less is better


def is_minimised(metric: str) -> bool:
    """Whether less of a metric is better, by its name."""
    return metric.endswith(MINIMISED)


class CheckpointError(UserError, RuntimeError):
    """A checkpoint cannot be written, or does not fit the run; names the path and the flag."""


@dataclass(frozen=True, kw_only=True)
class EngineLayout:
    """How an engine cuts its state into files; an engine with another layout cannot read them."""

    world_size: int
    zero_stage: int
    tensor_parallel_size: int = 1
    param_dtype: str = "bf16"

    def __str__(self) -> str:
        size = f", tensor parallel size {self.tensor_parallel_size}"
        return f"{self.world_size} process(es) with ZeRO stage {self.zero_stage} in {self.param_dtype}{size}"


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Where a run stands, besides the state of its engines. A trainer makes it and resumes from it.

    Its `identity` survives JSON: keys are strings, sequences are lists.
    """

    step: int  # optimizer steps (offline) or rollout steps (RL) that are done
    epoch: int = 0  # passes over the data that are done: epochs, in RL episodes
    consumed: int = 0  # rows, in RL prompts, drawn so far
    kl_coef: float | None = None
    best_metric_key: str | None = None
    best_metric_value: float | None = (
        None  # of the run so far: in every checkpoint, not only in the best
    )
    best_step: int | None = None  # that had it
    evaluations_since_best: int = 0
    evaluated_at: int = -1  # the step of the last evaluation
    planned_updates: int = (
        0  # optimizer steps of the whole run, for the learning rate's schedule; 0: unknown
    )
    run_dir: str = ""
    started: str = ""  # the moment of the run's first start; empty in older checkpoints
    trained_format: bool = (
        False  # texts default to the model's trained format; false in older checkpoints
    )
    engines: Mapping[str, EngineLayout] = field(default_factory=dict)  # part → layout
    identity: Mapping[str, Any] = field(
        default_factory=dict
    )  # what a run that continues has to have in common

    def __post_init__(self) -> None:
        assert json.loads(json.dumps(self.identity, default=repr)) == self.identity

    @property
    def first_start(self) -> FirstStart:
        """What the run's first start decided for its later starts."""
        return FirstStart(moment=self.started or now(), trained_format=self.trained_format)

    def continued_folder(self, run_dir: str) -> str:
        """Return the run folder that a resumed run continues: its own, or `run_dir` if it was moved
        there.

        A run folder that has moved no longer exists at its own path, and there is one at `run_dir`,
        which is absolute.
        """
        moved = not os.path.isdir(self.run_dir) and os.path.isdir(run_dir)
        return run_dir if moved else self.run_dir


@dataclass(frozen=True, kw_only=True)
class StagedCheckpoint:
    """Where the files of a checkpoint are: aside while they are written, in --ckpt.path once they
    are committed.
    """

    directory: Path
    tag: str
    nonce: str  # tells two saves of one tag apart
    places: tuple[str, ...]  # its directories, relative to `directory`

    def engine_dir(self, part: str = "") -> str:
        """The directory that DeepSpeed's `save_checkpoint` and `load_checkpoint` take, beside the
        tag.
        """
        return str(self.directory / part)

    @property
    def hf_dir(self) -> str:
        """The directory of the export, if the checkpoint has one."""
        return str(self.directory / f"{self.tag}_hf")


@dataclass(frozen=True, kw_only=True)
class Checkpoint(StagedCheckpoint):
    """One committed checkpoint. Created by `CheckpointManager`, consumed by trainers."""

    sequence: int  # running number of the save
    files: Mapping[str, tuple[int, str]]  # path relative to `directory` → bytes, hash
    metric_key: str | None
    metric_value: float | None
    state: RunState

    @property
    def is_best(self) -> bool:
        """Whether it was saved because an evaluation was the best so far."""
        return self.tag.startswith("best_")

    @property
    def worth(self) -> float | None:
        """The metric, with its sign changed if less is better; None without a metric."""
        if self.metric_value is None:
            return None
        return -self.metric_value if is_minimised(self.metric_key or "") else self.metric_value

    @property
    def size(self) -> int:
        """Bytes of all its files."""
        return sum(size for size, _ in self.files.values())

    @property
    def parts(self) -> tuple[str, ...]:
        """The engines in the checkpoint: `""` offline, `_actor` and `_critic` in RL; none in an
        export.
        """
        return tuple(os.path.dirname(place) for place in self.places if not place.endswith("_hf"))

    def check_continued_by(self, run: RunState, *, layout: str, converts: bool = False) -> None:
        """Raise CheckpointError, naming every difference, if a run with these engines and identity
        cannot continue it.

        Print a notice if the continuing run has a different number of optimizer steps, and so a
        different learning rate. `layout`: the flags that set the layout of the engines, in words.
        `converts`: a layout that can be converted fits.
        """
        written, engines = self.state.engines, run.engines
        fits = converts and _convertible(written) == _convertible(engines)
        then = {**self.state.identity, layout: _in_words(engines if fits else written)}
        now = {**run.identity, layout: _in_words(engines)}
        if different := differences(then, now):
            hint = f"\n{CONVERTS}" if written != engines else ""
            raise CheckpointError(
                f"{self.tag} in --ckpt.path {self.directory} is of another run. Continue it with what it was written with, or "
                "choose another --ckpt.path:"
                + "".join(f"\n  {difference}" for difference in different)
                + hint
            )
        planned = self.state.planned_updates
        if planned and run.planned_updates and planned != run.planned_updates:
            notice(
                f"The run that wrote {self.tag} was planned with {planned} optimizer steps, this one has "
                f"{run.planned_updates} (--train.max_epochs, in RL also --train.num_episodes): from here on the learning "
                f"rate follows the schedule of {run.planned_updates} steps, and may jump. For the old schedule, pass the old value."
            )

    def manifest(self) -> str:
        """The text of its manifest: its fields but the directory, a format number and a SHA-256."""
        values = asdict(self)
        del values["directory"]
        return json.dumps(
            {"format": FORMAT, "sha256": _json_hash(values), "checkpoint": values}, indent=1
        )

    @classmethod
    def read(cls, path: Path, *, root: Path) -> Self:
        """The checkpoint under `root` that a manifest describes.

        Raises ValueError if the manifest is damaged, CheckpointError if it has another format.
        """
        manifest = json.loads(path.read_bytes())
        if not isinstance(manifest, dict) or not {"format", "sha256", "checkpoint"} <= set(
            manifest
        ):
            raise ValueError("it is no manifest")
        if manifest["format"] != FORMAT:
            raise CheckpointError(
                f"{path} has format {manifest['format']}, but this version of the program knows"
                f" {FORMAT}. Use the version that wrote it, or another --ckpt.path."
            )
        values = manifest["checkpoint"]
        if manifest["sha256"] != _json_hash(values):
            raise ValueError("its contents do not match its hash")
        engines = {
            part: EngineLayout(**layout) for part, layout in values["state"]["engines"].items()
        }
        values["state"] = RunState(**{**values["state"], "engines": engines})
        values["places"] = tuple(values["places"])
        values["files"] = {name: (size, digest) for name, (size, digest) in values["files"].items()}
        return cls(directory=root, **values)

    def damage(self) -> str | None:
        """What is wrong with the first damaged file, in words; None if the checkpoint is complete.

        Reads at most 16 MiB per file.
        """
        for name, (size, digest) in self.files.items():
            path = self.directory / name
            if not path.is_file():
                return f"{name} is missing"
            if (found := path.stat().st_size) != size:
                return f"{name} has {found} bytes instead of {size}"
            if fingerprint(path) != digest:
                return f"the contents of {name} are not those that were saved"
        return None


def _convertible(engines: Mapping[str, EngineLayout]) -> dict[str, EngineLayout]:
    """The same for all layouts that can be converted into each other: any number of processes, ZeRO
    1 or 2.
    """
    stages = {
        part: 1 if each.zero_stage == 2 else each.zero_stage for part, each in engines.items()
    }
    return {
        part: replace(each, world_size=0, zero_stage=stages[part]) for part, each in engines.items()
    }


def _in_words(engines: Mapping[str, EngineLayout]) -> str:
    return ", ".join(f"{part} {layout}".strip() for part, layout in engines.items())


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Each value that is not the same in two runs, with both values; a name that only one of them
    knows is left out.
    """
    return [
        f"{name}: {then[name]} there, {now[name]} here"
        for name in now
        if name in then and then[name] != now[name]
    ]


def _json_hash(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
