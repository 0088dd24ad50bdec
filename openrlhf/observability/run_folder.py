"""The folder of a run: its configuration, its numbers and its samples.

    config.yaml     the flags that were given on the command line or by a file; can be passed back with --config
    config_resolved.yaml    every value in effect
    metrics.jsonl   one object per log call: {"step": 12, "time": 1700000000.0, "train/kl": …}
    samples.jsonl   one object per logged episode: the keys of `sample_row`
    texts.txt       of an offline task: the first rows as the model is trained on them
    report.html     written by `report.py`
    logs/           one file per process
    wandb_id        the W&B run that a resumed run continues
    earlier/<n>/    files of an earlier run in the same folder

An evaluation after step 12 is a separate line with step 12, after the line of the training step;
readers merge the lines of a step. JSON has no NaN or infinity: such numbers become null. A line is
written to the file as soon as it is logged, so a killed process loses at most the line that it was
writing.
"""

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

from openrlhf.config.places import OWNED
from openrlhf.config.secrets import hide
from openrlhf.files import write_atomically
from openrlhf.locks import locked
from openrlhf.observability.log_file import LogFile, report_failed_write
from openrlhf.trajectory import Trajectory

CONFIG, RESOLVED, METRICS, SAMPLES = (
    "config.yaml",
    "config_resolved.yaml",
    "metrics.jsonl",
    "samples.jsonl",
)
TEXTS = "texts.txt"
REPORT, LOGS, WANDB_ID, EARLIER = "report.html", "logs", "wandb_id", "earlier"
ENTRIES = tuple(name for name in OWNED["run"] if name != EARLIER)


class RunFolder:
    """Writer of the files of a run. Only one live process may have it; other processes use only the
    path.

    Raises InUseError if another process has it.
    """

    def __init__(self, path: Path | str, *, resume_step: int | None = None) -> None:
        """Start a new run in `path`; files of an earlier run are moved to the folder `earlier`, if
        there are any.

        With `resume_step`, continue the run that is there: the lines that it logged after this step
        are deleted.
        """
        self.path = Path(path)
        self._lock = ExitStack()
        self._lock.enter_context(locked(self.path, f"--run.dir {path}"))
        self.earlier = set_aside(self.path) if resume_step is None else None
        self.logs = (self.path / LOGS).absolute()
        self.logs.mkdir(parents=True, exist_ok=True)
        if resume_step is not None:
            for file in (self.path / METRICS, self.path / SAMPLES):
                kept = (json_line(row) for row in read_lines(file) if row["step"] <= resume_step)
                write_atomically(file, kept)
        self._metrics = LogFile(self.path / METRICS)
        self._samples = LogFile(self.path / SAMPLES)

    def write_config(self, given: str, resolved: str) -> None:
        """Write config.yaml and config_resolved.yaml, each whole or not at all."""
        self._write(CONFIG, given)
        self._write(RESOLVED, resolved)

    def write_texts(self, texts: Iterable[str]) -> None:
        """Write texts.txt."""
        self._write(TEXTS, "\n".join(texts) + "\n")

    def _write(self, name: str, content: str) -> None:
        """Write a file completely or not at all; report a failure and continue."""
        try:
            write_atomically(self.path / name, content)
        except OSError as error:
            report_failed_write(self.path / name, error)

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Append the numbers of a step, or of an evaluation after it."""
        numbers = {name: float(value) for name, value in values.items()}
        self._metrics.write(json_line({"step": step, "time": time.time(), **numbers}))

    def log_samples(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append episodes, as `sample_row` gives them."""
        for row in rows:
            self._samples.write(json_line(row))

    def close(self) -> None:
        """Close the files, for good, and release the folder to other processes."""
        self._metrics.close()
        self._samples.close()
        self._lock.close()


def sample_row(step: int, trajectory: Trajectory, *, evaluation: bool = False) -> dict[str, Any]:
    """The line of samples.jsonl about an episode that was generated for `step`, or to evaluate the
    weights after `step`.
    """
    score = {} if trajectory.score is None else {"score": trajectory.score}
    played: dict[str, Any] = {}
    if trajectory.turns is not None:
        played = {"turns": trajectory.turns, "conversations": len(trajectory.conversations)}
    return {
        "step": step,
        "prompt_index": trajectory.prompt.index,
        "sample_index": trajectory.sample_index,
        "prompt": trajectory.prompt.text,
        "label": trajectory.prompt.label,
        "response": trajectory.response_text,
        "reward": trajectory.reward,
        "scores": score | dict(trajectory.extra_logs),  # the numbers of the user's code, too
        "stop_reason": trajectory.stop_reason,
        **played,  # of an agent's episode
        "weight_versions": trajectory.weight_versions,
        "error": hide(trajectory.error),
        "failure": trajectory.failure,  # the kind of the error
        "filtered": trajectory.filtered,  # whether dynamic filtering replaced its prompt
        "evaluation": evaluation,
    }


def set_aside(path: Path, names: Iterable[str] = ENTRIES) -> Path | None:
    """Move the files of an earlier run in `path` to the next free `earlier/<n>/`. Returns that
    folder, or None if there are no files.
    """
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
    """One line of valid JSON; a number that is not finite becomes null, an object that JSON does
    not know its text.
    """
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
