"""The parts of a checkpoint: its files, the state of the run, and the manifest that commits both.

Standard library only.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from openrlhf.config.flags import UserError
from openrlhf.data.first_start import FirstStart, now
from openrlhf.files import fingerprint
from openrlhf.reporting import notice

FORMAT = 1
CONVERSION_HINT = (
    "--ds.use_universal_ckpt only allows a different number of processes, and a change between "
    "ZeRO 1 and ZeRO 2."
)
# Suffixes of the names of metrics of which less is better.
MINIMISED = ("loss", "truncated_rate", "failed_episodes")


def is_minimised(metric: str) -> bool:
    """Return whether less of a metric is better, by its name."""
    return metric.endswith(MINIMISED)


class CheckpointError(UserError, RuntimeError):
    """A failure to write a checkpoint, or a checkpoint that does not fit the run.

    The message names the path and the flag.
    """


@dataclass(frozen=True, kw_only=True)
class EngineLayout:
    """The layout of an engine's state in files. An engine with another layout cannot read them."""

    world_size: int
    zero_stage: int
    tensor_parallel_size: int = 1
    param_dtype: str = "bf16"

    def __str__(self) -> str:
        return (
            f"{self.world_size} process(es) with ZeRO stage {self.zero_stage} in "
            f"{self.param_dtype}, tensor parallel size {self.tensor_parallel_size}"
        )


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The position of a run, besides the state of its engines.

    Trainers create it and resume from it. Its `identity` survives JSON: keys are strings, sequences
    are lists.
    """

    step: int  # completed optimizer steps (offline) or rollout steps (RL)
    epoch: int = 0  # completed passes over the data: epochs, in RL episodes
    consumed: int = 0  # rows, in RL prompts, drawn so far
    kl_coef: float | None = None
    best_metric_key: str | None = None
    # The best value of the run so far: in every checkpoint, not only in the best.
    best_metric_value: float | None = None
    best_step: int | None = None  # the step with the best value
    evaluations_since_best: int = 0
    evaluated_at: int = -1  # the step of the last evaluation
    # Optimizer steps of the whole run, for the learning rate's schedule; 0: unknown.
    planned_updates: int = 0
    run_dir: str = ""
    started: str = ""  # the moment of the run's first start; empty in older checkpoints
    # Texts default to the model's trained format; false in older checkpoints.
    trained_format: bool = False
    engines: Mapping[str, EngineLayout] = field(default_factory=dict)  # part → layout
    # Settings that a resumed run must share.
    identity: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert json.loads(json.dumps(self.identity, default=repr)) == self.identity

    @property
    def first_start(self) -> FirstStart:
        """The decisions of the run's first start that hold for its later starts."""
        return FirstStart(moment=self.started or now(), trained_format=self.trained_format)

    def continued_folder(self, run_dir: str) -> str:
        """Return the run folder to continue: the run's own, or `run_dir` if it has moved.

        The folder has moved if it no longer exists at its own path, and a folder exists at the
        absolute path `run_dir`.
        """
        moved = not os.path.isdir(self.run_dir) and os.path.isdir(run_dir)
        if moved:
            return run_dir
        return self.run_dir


@dataclass(frozen=True, kw_only=True)
class StagedCheckpoint:
    """The location of a checkpoint's files.

    They are in a temporary directory while they are written, and in --ckpt.path once committed.
    """

    directory: Path
    tag: str
    nonce: str  # distinguishes two saves of one tag
    places: tuple[str, ...]  # its directories, relative to `directory`

    def engine_dir(self, part: str = "") -> str:
        """Return the directory to pass to DeepSpeed's `save_checkpoint` and `load_checkpoint`."""
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
        """True if the checkpoint was saved because an evaluation was the best so far."""
        return self.tag.startswith("best_")

    @property
    def worth(self) -> float | None:
        """The metric, with its sign changed if less is better; None without a metric."""
        if self.metric_value is None:
            return None
        if is_minimised(self.metric_key or ""):
            return -self.metric_value
        return self.metric_value

    @property
    def size(self) -> int:
        """The size of all its files, in bytes."""
        return sum(size for size, _ in self.files.values())

    @property
    def parts(self) -> tuple[str, ...]:
        """The engines in the checkpoint: `""` offline, `_actor` and `_critic` in RL.

        A checkpoint that is only an export has none.
        """
        return tuple(os.path.dirname(place) for place in self.places if not place.endswith("_hf"))

    def check_continued_by(self, run: RunState, *, layout: str, converts: bool = False) -> None:
        """Raise CheckpointError, naming every difference, if `run` cannot continue the checkpoint.

        Print a notice if the continuing run has a different number of optimizer steps, and so a
        different learning rate. `layout` names the flags that set the layout of the engines. With
        `converts`, a layout that can be converted is accepted.
        """
        written = self.state.engines
        readable = written
        if converts and _convertible(written) == _convertible(run.engines):
            readable = run.engines
        then = {**self.state.identity, layout: _in_words(readable)}
        now = {**run.identity, layout: _in_words(run.engines)}
        different = differences(then, now)
        if different:
            lines = [
                f"{self.tag} in --ckpt.path {self.directory} is of another run. Resume it with the "
                "settings it was written with, or choose another --ckpt.path:"
            ]
            for difference in different:
                lines.append(f"  {difference}")
            if written != run.engines:
                lines.append(CONVERSION_HINT)
            raise CheckpointError("\n".join(lines))
        planned = self.state.planned_updates
        if planned and run.planned_updates and planned != run.planned_updates:
            notice(
                f"The run that wrote {self.tag} was planned with {planned} optimizer steps, this "
                f"one has {run.planned_updates} (--train.max_epochs, in RL also "
                "--train.num_episodes). From now on the learning rate follows the schedule of "
                f"{run.planned_updates} steps, and may jump. For the old schedule, pass the old "
                "value."
            )

    def manifest(self) -> str:
        """Return the text of the manifest: fields without the directory, format, and SHA-256."""
        values = asdict(self)
        del values["directory"]
        return json.dumps(
            {"format": FORMAT, "sha256": _json_hash(values), "checkpoint": values}, indent=1
        )

    @classmethod
    def read(cls, path: Path, *, root: Path) -> Self:
        """Return the checkpoint under `root` that a manifest describes.

        Raises ValueError if the manifest is damaged, CheckpointError if it has another format.
        """
        manifest = json.loads(path.read_bytes())
        required = {"format", "sha256", "checkpoint"}
        if not isinstance(manifest, dict) or not required <= set(manifest):
            raise ValueError("it is not a manifest")
        if manifest["format"] != FORMAT:
            raise CheckpointError(
                f"{path} has format {manifest['format']}, but this version of the program reads "
                f"format {FORMAT}. Use the version that wrote it, or another --ckpt.path."
            )
        values = manifest["checkpoint"]
        if manifest["sha256"] != _json_hash(values):
            raise ValueError("its contents do not match its hash")
        state = values["state"]
        for part, layout in state["engines"].items():
            state["engines"][part] = EngineLayout(**layout)
        values["state"] = RunState(**state)
        values["places"] = tuple(values["places"])
        values["files"] = {name: (size, digest) for name, (size, digest) in values["files"].items()}
        return cls(directory=root, **values)

    def damage(self) -> str | None:
        """Return what is wrong with the first damaged file; None if the checkpoint is complete.

        Read at most 16 MiB per file.
        """
        for name, (size, digest) in self.files.items():
            path = self.directory / name
            if not path.is_file():
                return f"{name} is missing"
            found = path.stat().st_size
            if found != size:
                return f"{name} has {found} bytes instead of {size}"
            if fingerprint(path) != digest:
                return f"{name} has changed since it was saved"
        return None


def _convertible(engines: Mapping[str, EngineLayout]) -> dict[str, EngineLayout]:
    """Return the layouts without the properties that can be converted.

    Convertible are the number of processes, and ZeRO 1 to 2 and back.
    """
    layouts: dict[str, EngineLayout] = {}
    for part, layout in engines.items():
        stage = layout.zero_stage
        if stage == 2:
            stage = 1
        layouts[part] = replace(layout, world_size=0, zero_stage=stage)
    return layouts


def _in_words(engines: Mapping[str, EngineLayout]) -> str:
    return ", ".join(f"{part} {layout}".strip() for part, layout in engines.items())


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a line for each name that has different values in two runs.

    Names that exist in only one of the runs are left out.
    """
    lines: list[str] = []
    for name, value in now.items():
        if name in then and then[name] != value:
            lines.append(f"{name}: {then[name]} there, {value} here")
    return lines


def _json_hash(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
