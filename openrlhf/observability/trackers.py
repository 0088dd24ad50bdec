"""Mirrors of metrics.jsonl: TensorBoard and Weights & Biases.

A tracker never stops a run. If a tracker cannot start or fails later, a warning is printed once and
the run continues without the tracker; the run folder always contains every number. An error is
raised only if a tracker's flag is set but its package is not installed, and only before models are
loaded.
"""

import importlib
import importlib.util
import textwrap
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from openrlhf.config.options import ConfigError
from openrlhf.config.shared import LoggerConfig, WandbConfig
from openrlhf.locks import locked
from openrlhf.observability.run_folder import WANDB_ID, read_text
from openrlhf.reporting import warn

SAMPLES_NAME = "train/generated_samples"
WANDB_KEY_LENGTH = 40  # a shorter --logger.wandb.key selects this machine's W&B login
WANDB_SAMPLE_ROWS = 200  # limited because every upload contains the entire table


class Trackers:
    """All trackers of a run.

    Each tracker has `log`, `log_samples` and `close`. Calls never raise: a tracker that fails is
    dropped with a warning.
    """

    def __init__(self, trackers: Sequence[Any]) -> None:
        self._trackers = list(trackers)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of a step to all trackers."""
        self._call_each("log", step, values)

    def log_samples(self, step: int, text: str, reward: float | None) -> None:
        """Log the text of a sample and its reward to all trackers."""
        self._call_each("log_samples", step, text, reward)

    def close(self) -> None:
        """Close all trackers."""
        self._call_each("close")

    def _call_each(self, method: str, *args: Any) -> None:
        for tracker in list(self._trackers):
            try:
                getattr(tracker, method)(*args)
            except Exception as error:
                self._trackers.remove(tracker)
                name = type(tracker).__name__
                warn(f"{name} failed. The run continues without it: {error!r}")


class TensorBoardTracker:
    """TensorBoard event files, which can be read while the run is active."""

    def __init__(self, directory: Path, *, resume_step: int | None = None) -> None:
        """Open the folder, and hide events written after `resume_step` by an earlier process.

        Raises InUseError if another run uses the folder.
        """
        self._lock = ExitStack()
        self._lock.enter_context(locked(directory, f"TensorBoard folder {directory}"))
        purge_step = None if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(directory, purge_step=purge_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the metrics of a step, and flush the file."""
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)
        self._writer.flush()

    def log_samples(self, step: int, text: str, reward: float | None) -> None:
        """Write the text of a sample and its reward; TensorBoard shows the text unformatted."""
        # Indented text is a Markdown code block, which is shown verbatim.
        verbatim = textwrap.indent(text, "    ", lambda line: True)
        self._writer.add_text(SAMPLES_NAME, f"reward {reward}\n\n{verbatim}", step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file, and release the lock on its folder."""
        self._writer.close()
        self._lock.close()


class WandbTracker:
    """A W&B run. A resumed run continues its W&B run, whose id is stored in the run folder."""

    def __init__(self, wandb: WandbConfig, *, settings: Mapping[str, Any], run_dir: Path) -> None:
        self._wandb: Any = importlib.import_module("wandb")  # optional dependency
        if wandb.key and len(wandb.key) >= WANDB_KEY_LENGTH:
            self._wandb.login(key=wandb.key)
        id_file = run_dir / WANDB_ID
        self._run: Any = self._wandb.init(
            entity=wandb.org,
            project=wandb.project,
            group=wandb.group,
            name=wandb.run_name or run_dir.name,
            config=dict(settings),
            dir=str(run_dir),
            id=read_text(id_file) or None,
            resume="allow",
        )
        id_file.write_text(self._run.id)
        for stage in ("train", "rollout", "timing", "eval"):
            self._run.define_metric(f"{stage}/*", step_metric=_wandb_axis(stage))
        self._samples = deque[tuple[int, str, float | None]](maxlen=WANDB_SAMPLE_ROWS)
        self._new_samples = 0  # samples added since the last upload

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of a step on the x axis of their stage."""
        row = dict(values)
        for name in values:
            stage, _, _ = name.partition("/")
            row[_wandb_axis(stage)] = step
        self._run.log(row)

    def log_samples(self, step: int, text: str, reward: float | None) -> None:
        """Add a sample to the table of the latest samples.

        The table is uploaded when a tenth of its rows are new. Otherwise, a run of 10,000 steps
        would upload gigabytes.
        """
        self._samples.append((step, text, reward))
        self._new_samples += 1
        if 10 * self._new_samples >= len(self._samples):
            self._upload_samples()

    def _upload_samples(self) -> None:
        columns = ["global_step", "text", "reward"]
        table = self._wandb.Table(columns=columns, data=list(self._samples))
        step, _, _ = self._samples[-1]
        self._run.log({SAMPLES_NAME: table, "train/global_step": step})
        self._new_samples = 0

    def close(self) -> None:
        """Upload the latest samples, and finish the W&B run."""
        if self._new_samples:
            self._upload_samples()
        self._run.finish()


def _wandb_axis(stage: str) -> str:
    """Return the name of the metric used as a stage's x axis.

    Evaluations have their own axis, because an asynchronous evaluation may be logged after later
    training steps.
    """
    if stage == "eval":
        return "eval/global_step"
    return "train/global_step"


def make_trackers(
    config: LoggerConfig,
    *,
    settings: Mapping[str, Any],
    run_dir: Path,
    resume_step: int | None = None,
) -> Trackers:
    """Start the trackers selected by the flags.

    `settings` is the resolved configuration to be shown in W&B. `resume_step` is the step from
    which a resumed run continues. Raises ConfigError if a W&B key is set but wandb is not
    installed; any other startup failure is a warning.
    """
    wandb = config.wandb
    # W&B creates a folder ./wandb, which Python treats as a namespace package without an origin.
    package = importlib.util.find_spec("wandb")
    if wandb.key and (package is None or package.origin is None):
        raise ConfigError(
            "--logger.wandb.key is set, but the package wandb is not installed. "
            "Install it (pip install wandb) or remove the flag."
        )
    starts: dict[str, Callable[[], Any]] = {}
    if config.tensorboard_dir:
        directory = Path(config.tensorboard_dir) / (wandb.run_name or run_dir.name)
        starts["TensorBoard"] = lambda: TensorBoardTracker(directory, resume_step=resume_step)
    if wandb.key:
        starts["W&B"] = lambda: WandbTracker(wandb, settings=settings, run_dir=run_dir)
    started: list[Any] = []
    for name, start in starts.items():
        try:
            started.append(start())
        except Exception as error:
            warn(f"{name} could not start. The run continues without it: {error!r}")
    return Trackers(started)
