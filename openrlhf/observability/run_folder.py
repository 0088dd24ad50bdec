"""The run folder: configuration, metrics and samples of a run.

    config.yaml     the flags set on the command line or in a file, for --config; begins with
                    comments: the command and the notices printed at startup
    config_resolved.yaml    the value of every flag
    metrics.jsonl   one object per log call: {"step": 12, "time": 1700000000.0, "train/kl": …}
    samples.jsonl   one object per logged episode, with the keys of `sample_row`
    notices.jsonl   one object per notice about the metrics: {"step": 12, "notice": "Steps 8 to …"}
    texts.txt       the first training rows as the model sees them (offline tasks)
    plan.txt        the predicted memory of each model at each instant of a step
    report.html     written by `report.py`
    logs/           one file per process
    wandb_id        the id of the W&B run, which a resumed run continues
    earlier/<n>/    files of an earlier run in the same folder

An evaluation after step 12 is a separate line with step 12, after the training step's line; readers
merge the lines of a step. JSON has no NaN or infinity: non-finite numbers become null. A line is
written as soon as it is logged, so a killed process loses at most the line that it was writing.
"""

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from mmap import ACCESS_READ, mmap
from pathlib import Path
from textwrap import indent
from typing import Any

from openrlhf.config.places import OWNED
from openrlhf.core.trajectory import Trajectory
from openrlhf.files import write_atomically
from openrlhf.locks import locked
from openrlhf.masking import hide
from openrlhf.observability.log_file import LogFile, report_failed_write

CONFIG = "config.yaml"
RESOLVED = "config_resolved.yaml"
METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
NOTICES = "notices.jsonl"
TEXTS = "texts.txt"
PLAN = "plan.txt"
REPORT = "report.html"
LOGS = "logs"
WANDB_ID = "wandb_id"
EARLIER = "earlier"
ENTRIES = tuple(name for name in OWNED["run"] if name != EARLIER)


class RunFolder:
    """Writer of a run's files.

    Only one live process may write to the folder. Raises InUseError if another process holds its
    lock.
    """

    def __init__(self, path: Path | str, *, resume_step: int | None = None) -> None:
        """Start a new run in `path`, and move files of an earlier run to `earlier/<n>/`.

        With `resume_step`, continue the run in `path` and delete the lines that it logged after
        this step.
        """
        self.path = Path(path)
        self._lock = ExitStack()
        self._lock.enter_context(locked(self.path, f"--run.dir {path}"))
        self.earlier: Path | None = None
        if resume_step is None:
            self.earlier = set_aside(self.path)
        else:
            for name in (METRICS, SAMPLES, NOTICES):
                cut_after(resume_step, self.path / name)
        self.logs = (self.path / LOGS).absolute()
        self.logs.mkdir(exist_ok=True)
        self._metrics = LogFile(self.path / METRICS)
        self._samples = LogFile(self.path / SAMPLES)
        self._notices = LogFile(self.path / NOTICES)

    def write_config(self, given: str, resolved: str, start: Iterable[str] = ()) -> None:
        """Write config.yaml, beginning with `start` as comments, and config_resolved.yaml."""
        comments = indent("".join(f"{line}\n" for line in start), "# ")
        self._write(CONFIG, comments + given)
        self._write(RESOLVED, resolved)

    def write_lines(self, name: str, lines: Iterable[str]) -> None:
        """Write texts.txt or plan.txt."""
        self._write(name, "\n".join(lines) + "\n")

    def _write(self, name: str, content: str) -> None:
        """Write a file atomically; report a failure and continue."""
        try:
            write_atomically(self.path / name, content)
        except OSError as error:
            report_failed_write(self.path / name, error)

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Append the metrics of a step, or of an evaluation after that step."""
        numbers = {name: float(value) for name, value in values.items()}
        self._metrics.write(json_line({"step": step, "time": time.time(), **numbers}))

    def log_samples(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append episodes, given as rows from `sample_row`."""
        for row in rows:
            self._samples.write(json_line(row))

    def log_notices(self, step: int, notices: Iterable[str]) -> None:
        """Append notices that follow from the metrics up to a step."""
        for notice in notices:
            self._notices.write(json_line({"step": step, "notice": notice}))

    def close(self) -> None:
        """Close the files and release the folder's lock."""
        for file in (self._metrics, self._samples, self._notices):
            file.close()
        self._lock.close()


def sample_row(step: int, trajectory: Trajectory, *, evaluation: bool = False) -> dict[str, Any]:
    """Return an episode's row for samples.jsonl.

    The episode was generated for training step `step`, or to evaluate the weights after that step.
    """
    scores: dict[str, float] = {}
    if trajectory.score is not None:
        scores["score"] = trajectory.score
    scores.update(trajectory.extra_logs)  # numbers returned by user code
    agent_counts: dict[str, int] = {}
    if trajectory.turns is not None:
        agent_counts["turns"] = trajectory.turns
        agent_counts["conversations"] = len(trajectory.conversations)
    return {
        "step": step,
        "prompt_index": trajectory.prompt.index,
        "sample_index": trajectory.sample_index,
        "prompt": trajectory.prompt.text,
        "label": trajectory.prompt.label,
        "response": trajectory.response_text,
        "reward": trajectory.reward,
        "scores": scores,
        "stop_reason": trajectory.stop_reason,
        **agent_counts,
        "weight_versions": trajectory.weight_versions,
        "error": hide(trajectory.error),
        "failure": trajectory.failure,  # the kind of the error
        "filtered": trajectory.filtered,  # True if dynamic filtering discarded its prompt
        "evaluation": evaluation,
    }


def set_aside(path: Path, names: Iterable[str] = ENTRIES) -> Path | None:
    """Move the files of an earlier run in `path` to the next free `earlier/<n>/`.

    Returns that folder, or None if there were no files.
    """
    leftovers = [path / name for name in names if (path / name).exists()]
    if not leftovers:
        return None
    number = 1
    while (path / EARLIER / str(number)).exists():
        number += 1
    target = path / EARLIER / str(number)
    target.mkdir(parents=True)
    for file in leftovers:
        file.rename(target / file.name)
    return target


def json_line(row: Mapping[str, Any]) -> str:
    """Return one line of valid JSON.

    Non-finite numbers become null. Objects that JSON does not support become strings.
    """
    finite = json.loads(json.dumps(row, default=str), parse_constant=lambda _: None)
    return json.dumps(finite, ensure_ascii=False) + "\n"


def read_text(path: Path) -> str:
    """Return the text of a file, or "" if the file does not exist."""
    if not path.exists():
        return ""
    return path.read_text(encoding="utf-8", errors="replace")


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a .jsonl file that have a step, skipping incomplete and unrelated lines.

    A missing file yields nothing. The file may be read while the run writes to it.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if row := _row(line):
                yield row


def _row(line: bytes) -> dict[str, Any] | None:
    """Return the row in a line, or None if the line is incomplete or has no step."""
    with suppress(json.JSONDecodeError):
        match json.loads(line.decode(errors="replace")):
            case {"step": int()} as row:
                return row
            case _:
                pass
    return None


def read_notices(folder: Path) -> list[str]:
    """Return the notices stored in a run folder."""
    return [row["notice"] for row in read_lines(folder / NOTICES)]


def cut_after(step: int, path: Path) -> None:
    """Remove the rows after this step, and an incomplete last line, from the end of a .jsonl file.

    The rows must be ordered by step, as a run logs them. Only the removed rows are read, because
    the samples of a long run take gigabytes. A process that is killed here leaves the file as it
    was or cut.
    """
    if not path.exists() or not path.stat().st_size:
        return
    with path.open("r+b") as file:
        with mmap(file.fileno(), 0, access=ACCESS_READ) as content:
            end = len(content)
            while end:
                start = content.rfind(b"\n", 0, end - 1) + 1
                line = content[start:end]
                row = _row(line)
                if row and row["step"] <= step and line.endswith(b"\n"):
                    break
                end = start
        file.truncate(end)
