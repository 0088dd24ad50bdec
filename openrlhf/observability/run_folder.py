"""The folder of a run: its configuration, its numbers and its samples.

    config.yaml     the flags that were given on the command line or by a file; can be passed back with --config
    config_resolved.yaml    every value in effect
    metrics.jsonl   one object per log call: {"step": 12, "time": 1700000000.0, "train/kl": …}
    samples.jsonl   one object per logged episode: the fields of `SampleRow`
    report.html     written by `report.py`
    logs/           one file per process
    wandb_id        the W&B run that a resumed run continues
    earlier/<n>/    files of an earlier run in the same folder

An evaluation after step 12 is a separate line with step 12, after the line of the training step; readers merge the
lines of a step. JSON has no NaN or infinity: such numbers become null. A line is written to the file as soon as it is
logged, so a killed process loses at most the line that it was writing.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TextIO, cast

from openrlhf.files import write_atomically
from openrlhf.trajectory import Trajectory

CONFIG, RESOLVED, METRICS, SAMPLES = "config.yaml", "config_resolved.yaml", "metrics.jsonl", "samples.jsonl"
REPORT, LOGS, WANDB_ID = "report.html", "logs", "wandb_id"
ENTRIES = (CONFIG, RESOLVED, METRICS, SAMPLES, REPORT, LOGS, WANDB_ID, "wandb")


@dataclass(frozen=True, kw_only=True)
class SampleRow:
    """One line of samples.jsonl. `scores` holds the score and the numbers of the user's code."""

    step: int
    prompt_index: int
    sample_index: int
    prompt: str
    response: str
    reward: float | None
    scores: Mapping[str, float]
    stop_reason: str
    weight_versions: tuple[int, ...]
    error: str | None
    failure: str | None = None  # the kind of the error
    filtered: bool = False  # dynamic filtering replaced its prompt
    evaluation: bool = False  # sampled by an evaluation of the weights after `step`

    @classmethod
    def of(cls, step: int, trajectory: Trajectory, *, evaluation: bool = False) -> Self:
        """The row of an episode that was generated for `step`, or to evaluate the weights after it."""
        score = {} if trajectory.score is None else {"score": trajectory.score}
        return cls(
            step=step,
            prompt_index=trajectory.prompt.index,
            sample_index=trajectory.sample_index,
            prompt=trajectory.prompt.text,
            response=trajectory.response_text,
            reward=trajectory.reward,
            scores=score | dict(trajectory.extra_logs),
            stop_reason=str(trajectory.stop_reason),
            weight_versions=trajectory.weight_versions,
            error=trajectory.error,
            failure=trajectory.failure and str(trajectory.failure),
            filtered=trajectory.filtered,
            evaluation=evaluation,
        )


@dataclass(frozen=True, kw_only=True)
class ComparedRow(SampleRow):
    """A line about two answers. `response` and `reward` belong to the model under evaluation; `win` is 1.0 if its answer is the better one."""

    against: str = ""
    against_reward: float | None = None
    win: float | None = None


class RunFolder:
    """Writes the files of a run. Only one process may have it; others use the path."""

    def __init__(self, path: Path | str, *, earlier: Path | None = None) -> None:
        """Open `path`, created if needed, and append to its files; an unfinished line is cut. `earlier`: where an earlier run's files are."""
        self.path, self.earlier = Path(path), earlier
        self.logs = self.path / LOGS
        self.logs.mkdir(parents=True, exist_ok=True)
        self._metrics = _open_to_append(self.path / METRICS)
        self._samples = _open_to_append(self.path / SAMPLES)

    @classmethod
    def create(cls, path: Path | str) -> Self:
        """Start a new run in `path`; files of an earlier one are moved to `earlier/<n>/`."""
        return cls(path, earlier=set_aside(Path(path)))

    def write_config(self, given: str, resolved: str) -> None:
        """Write config.yaml and config_resolved.yaml, each whole or not at all."""
        write_atomically(self.path / CONFIG, given)
        write_atomically(self.path / RESOLVED, resolved)

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Append the numbers of a step, or of an evaluation after it."""
        numbers = {name: float(value) for name, value in values.items()}
        self._metrics.write(json_line({"step": step, "time": time.time(), **numbers}))

    def log_samples(self, rows: Iterable[SampleRow]) -> None:
        """Append sampled episodes."""
        for row in rows:
            self._samples.write(json_line(vars(row)))

    def truncate_to(self, step: int) -> None:
        """Delete the lines logged after `step`, where a resumed run continues. Each file is replaced as a whole."""
        self.close()
        for name in (METRICS, SAMPLES):
            rows = read_lines(self.path / name)
            write_atomically(self.path / name, *(json_line(row) for row in rows if row["step"] <= step))
        self._metrics = _open_to_append(self.path / METRICS)
        self._samples = _open_to_append(self.path / SAMPLES)

    def close(self) -> None:
        """Close the files; logging afterwards is an error."""
        self._metrics.close()
        self._samples.close()


def set_aside(path: Path, names: Iterable[str] = ENTRIES) -> Path | None:
    """Move the files of an earlier run in `path` to the next free `earlier/<n>/`. Returns that folder, or None if there are no files."""
    left = [path / name for name in names if (path / name).exists()]
    if not left:
        return None
    taken = [int(old.name) for old in path.glob("earlier/*") if old.name.isdigit()]
    target = path / "earlier" / str(max(taken, default=0) + 1)
    target.mkdir(parents=True)
    for file in left:
        file.rename(target / file.name)
    return target


def json_line(row: Mapping[str, Any]) -> str:
    """One line of valid JSON; a number that is not finite becomes null, an object that JSON does not know its text."""
    finite = json.loads(json.dumps(row, default=str), parse_constant=lambda _: None)
    return json.dumps(finite, ensure_ascii=False) + "\n"


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a .jsonl file that have a step; unfinished and foreign lines are skipped.

    A missing file has no rows. A file may be read while the run writes to it.
    """
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for line in file:
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(row, dict) and isinstance(cast(dict[str, Any], row).get("step"), int):
                yield cast(dict[str, Any], row)


def _open_to_append(path: Path) -> TextIO:
    """Open line-buffered, after cutting a line that a killed process left unfinished."""
    with path.open("ab+") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - 65536)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        file.truncate(end)
    return path.open("a", encoding="utf-8", errors="replace", newline="\n", buffering=1)
