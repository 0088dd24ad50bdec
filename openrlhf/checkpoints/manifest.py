"""A checkpoint's parts: its files, the run state, and the manifest that commits both.

Only the standard library is used.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from openrlhf.config.commands import RecordedCommand
from openrlhf.config.flags import UserError
from openrlhf.data.first_start import FirstStart, now
from openrlhf.files import fingerprint
from openrlhf.reporting import notice

FORMAT = 1
CONVERSION_HINT = (
    "--ds.use_universal_ckpt allows changing the number of processes and, with ZeRO 1 to 3, "
    "--ds.tensor_parallel_size. It also allows switching between ZeRO 1 and ZeRO 2."
)
# Name suffixes of metrics for which lower is better.
MINIMISED = ("loss", "truncated_rate", "failed_episodes")


def is_minimised(metric: str) -> bool:
    """Return whether a metric's name implies that lower is better."""
    return metric.endswith(MINIMISED)


class CheckpointError(UserError, RuntimeError):
    """A failed checkpoint write, or a checkpoint that does not match the run.

    The message names the path and the flag.
    """


@dataclass(frozen=True, kw_only=True)
class StateLayout:
    """The layout of DeepSpeed's state files for one trained model.

    A run with a different layout cannot read the files.
    """

    world_size: int
    zero_stage: int
    tensor_parallel_size: int = 1
    param_dtype: str = "bf16"
    optim: str = "adam"

    def __str__(self) -> str:
        return (
            f"{self.world_size} process(es) with ZeRO stage {self.zero_stage} in "
            f"{self.param_dtype}, tensor parallel size {self.tensor_parallel_size}, optimizer "
            f"{self.optim}"
        )


@dataclass(frozen=True, kw_only=True)
class RunState:
    """A run's position, apart from its engines' state.

    Trainers create the state and resume from it. `identity` survives a JSON round trip: keys are
    strings, and sequences are lists.
    """

    step: int  # completed optimizer steps (offline) or rollout steps (RL)
    epoch: int = 0  # completed passes over the data: epochs, or episodes in RL
    consumed: int = 0  # rows drawn so far, or prompts in RL
    kl_coef: float | None = None
    kl: float | None = None  # KL to the reference in the last step; None in older checkpoints
    best_metric_key: str | None = None
    # The run's best value so far, stored in every checkpoint, not just the best one.
    best_metric_value: float | None = None
    best_step: int | None = None  # the step at which the best value was measured
    evaluations_since_best: int = 0
    evaluated_at: int = -1  # the step of the last evaluation
    # Total number of optimizer steps in the run, for the learning rate schedule; 0 if unknown.
    planned_updates: int = 0
    run_dir: str = ""
    started: str = ""  # time of the run's first start; empty in older checkpoints
    # True if texts default to the format the model was trained on; false in older checkpoints.
    trained_format: bool = False
    engines: Mapping[str, StateLayout] = field(default_factory=dict)  # part name → layout
    # Settings that must not change when the run resumes.
    identity: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert json.loads(json.dumps(self.identity, default=repr)) == self.identity

    @property
    def first_start(self) -> FirstStart:
        """The decisions made when the run was first started, which also apply when it resumes."""
        return FirstStart(moment=self.started or now(), trained_format=self.trained_format)

    def continued_folder(self, run_dir: str) -> str:
        """Return the run folder to continue: the original, or `run_dir` if the folder has moved.

        The folder has moved if its original path no longer exists and `run_dir`, an absolute path,
        is an existing folder.
        """
        moved = not os.path.isdir(self.run_dir) and os.path.isdir(run_dir)
        if moved:
            return run_dir
        return self.run_dir


@dataclass(frozen=True, kw_only=True)
class StagedCheckpoint:
    """The location of a checkpoint's files.

    The files are in a temporary directory while they are being written, and in --ckpt.path after
    the commit.
    """

    directory: Path
    tag: str
    nonce: str  # distinguishes different saves of the same tag
    places: tuple[str, ...]  # the checkpoint's directories, relative to `directory`

    def engine_dir(self, part: str = "") -> str:
        """Return the directory to pass to DeepSpeed's `save_checkpoint` and `load_checkpoint`."""
        return str(self.directory / part)

    @property
    def hf_dir(self) -> str:
        """The directory for the export, if the checkpoint has one."""
        return str(self.directory / f"{self.tag}_hf")


@dataclass(frozen=True, kw_only=True)
class Checkpoint(StagedCheckpoint):
    """A committed checkpoint, created by `CheckpointManager` and consumed by trainers."""

    sequence: int  # sequence number of the save
    files: Mapping[str, tuple[int, str]]  # path relative to `directory` → bytes, hash
    metric_key: str | None
    metric_value: float | None
    state: RunState

    def may_be_resumed_by(self, config: RecordedCommand) -> bool:
        """Return whether a run with these flags, or its restart, may resume the checkpoint.

        A run that restarts itself resumes only its own checkpoints, not those of another run that
        shares --ckpt.path, unless the user has set --ckpt.load_enable.
        """
        if config.given.get("ckpt.load_enable"):
            return True
        return self.state.run_dir == os.path.abspath(config.run.dir)

    @property
    def is_best(self) -> bool:
        """True if the checkpoint was saved after the best evaluation so far."""
        return self.tag.startswith("best_")

    @property
    def worth(self) -> float | None:
        """The metric, negated if lower is better; None without a metric."""
        if self.metric_value is None:
            return None
        if is_minimised(self.metric_key or ""):
            return -self.metric_value
        return self.metric_value

    @property
    def size(self) -> int:
        """The total size of the checkpoint's files, in bytes."""
        return sum(size for size, _ in self.files.values())

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the engines in the checkpoint: "" in offline runs, `_actor` and `_critic` in
        RL runs.

        A checkpoint that contains only an export has no engines.
        """
        return tuple(os.path.dirname(place) for place in self.places if not place.endswith("_hf"))

    def check_continued_by(self, run: RunState, *, layout: str, converts: bool = False) -> None:
        """Raise CheckpointError, naming every difference, if `run` cannot continue the checkpoint.

        Print a notice if the continuing run has a different number of optimizer steps, and
        therefore a different learning rate. `layout` names the flags that determine the engine
        layout. If `converts` is true, a convertible layout is accepted.
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
                f"{self.tag} in --ckpt.path {self.directory} was written by a run with different "
                "settings. Resume it with the original settings, or choose a different --ckpt.path:"
            ]
            for difference in different:
                lines.append(f"  {difference}")
            if written != run.engines:
                lines.append(CONVERSION_HINT)
            raise CheckpointError("\n".join(lines))
        planned = self.state.planned_updates
        if planned and run.planned_updates and planned != run.planned_updates:
            notice(
                f"The run that wrote {self.tag} was planned for {planned} optimizer steps, but "
                f"this run is planned for {run.planned_updates} (--train.max_epochs, in RL also "
                "--train.num_episodes). The learning rate now follows the new schedule and may "
                "jump. To keep the old schedule, pass the old value."
            )

    def manifest(self) -> str:
        """Return the manifest text: the format, a SHA-256, and all fields except the directory."""
        values = asdict(self)
        del values["directory"]
        return json.dumps(
            {"format": FORMAT, "sha256": _json_hash(values), "checkpoint": values}, indent=1
        )

    @classmethod
    def read(cls, path: Path, *, root: Path) -> Self:
        """Return the checkpoint under `root` that a manifest describes.

        Raises ValueError if the manifest is damaged, and CheckpointError if it has a different
        format.
        """
        manifest = json.loads(path.read_bytes())
        required = {"format", "sha256", "checkpoint"}
        if not isinstance(manifest, dict) or not required <= set(manifest):
            raise ValueError("it is not a manifest")
        if manifest["format"] != FORMAT:
            raise CheckpointError(
                f"{path} has format {manifest['format']}, but this version of the program reads "
                f"format {FORMAT}. Use the version that wrote it, or a different --ckpt.path."
            )
        values = manifest["checkpoint"]
        if manifest["sha256"] != _json_hash(values):
            raise ValueError("its contents do not match its hash")
        state = values["state"]
        for part, layout in state["engines"].items():
            state["engines"][part] = StateLayout(**layout)
        values["state"] = RunState(**state)
        values["places"] = tuple(values["places"])
        values["files"] = {name: (size, digest) for name, (size, digest) in values["files"].items()}
        return cls(directory=root, **values)

    def damage(self) -> str | None:
        """Describe the first damaged file; return None if the checkpoint is complete.

        Reads at most 16 MiB per file.
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


def _convertible(engines: Mapping[str, StateLayout]) -> dict[str, StateLayout]:
    """Return the layouts without their convertible properties.

    The number of processes is convertible. ZeRO stages 1 and 2 can be converted into each other,
    and the tensor-parallel size is convertible unless the ZeRO stage is 0.
    """
    layouts: dict[str, StateLayout] = {}
    for part, layout in engines.items():
        layout = replace(layout, world_size=0)
        if layout.zero_stage > 0:
            layout = replace(layout, tensor_parallel_size=1)
        if layout.zero_stage == 2:
            layout = replace(layout, zero_stage=1)
        layouts[part] = layout
    return layouts


def _in_words(engines: Mapping[str, StateLayout]) -> str:
    return ", ".join(f"{part} {layout}".strip() for part, layout in engines.items())


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a line for each name whose values differ between two runs.

    Names that exist in only one of the runs are skipped.
    """
    lines: list[str] = []
    for name, value in now.items():
        if name in then and then[name] != value:
            lines.append(f"{name}: was {then[name]}, now {value}")
    return lines


def _json_hash(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
