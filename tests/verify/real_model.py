"""Records of training runs with a real model, and the page generated from them.

docs/results/real_model.jsonl contains a JSON line for each run and seed.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

import psutil

from tests.verify.learning import sparkline
from tests.verify.results import FOLDER

RECORDS = FOLDER / "real_model.jsonl"
PAGE = FOLDER / "real_model.md"
COMMAND = "python -m pytest -m verify tests/verify/test_real_model.py"
LOOK_S = 2.0  # seconds between memory measurements


class PeakMemory:
    """A context manager that measures the peak memory of this process's descendants.

    Shared memory pages are counted once.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(LOOK_S):
            self.bytes = max(self.bytes, _held())


def _held() -> int:
    total = 0
    for process in psutil.Process().children(recursive=True):
        try:
            total += process.memory_full_info().pss
        except psutil.Error:  # the process has ended
            continue
    return total


@dataclass(frozen=True, kw_only=True)
class Answered:
    """A model's answers to a prompt at temperature 0, before and after training."""

    prompt: str
    before: str
    after: str


@dataclass(frozen=True, kw_only=True)
class RealRun:
    """One run with one seed."""

    name: str
    seed: int
    command: str  # command line as a user types it, without paths and seed
    measured: str  # the quantity that `before` and `after` measure
    before: float
    after: float
    error: float  # standard error of the difference; 0 if both use the same rows
    better: str  # "higher" or "lower"
    curve_of: str  # a metric's name
    curve: list[float]
    seconds: float
    peak_gib: float
    answers: list[Answered]
    versions: str

    @property
    def learned(self) -> bool:
        """Return whether the measured value improved by more than two standard errors."""
        gain = self.after - self.before if self.better == "higher" else self.before - self.after
        return gain > 2 * self.error


def read_runs(path: Path = RECORDS) -> list[RealRun]:
    """Return all recorded runs, or none if the file does not exist."""
    runs = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        row = json.loads(line)
        answers = [Answered(**each) for each in row.pop("answers")]
        runs.append(RealRun(**row, answers=answers))
    return runs


def record(run: RealRun, path: Path = RECORDS) -> None:
    """Record a run, replacing any earlier record with the same name and seed."""
    others = [each for each in read_runs(path) if (each.name, each.seed) != (run.name, run.seed)]
    runs = sorted([*others, run], key=lambda each: (each.name, each.seed))
    path.write_text("".join(json.dumps(asdict(each)) + "\n" for each in runs), encoding="utf-8")


def page(runs: Sequence[RealRun]) -> str:
    """Return the text of docs/results/real_model.md."""
    lines = [
        "# A real model",
        "",
        f"`{COMMAND}`: {'; '.join(sorted({run.versions for run in runs}))}.",
        "",
        (
            "SmolLM2-135M-Instruct with weights rounded to about 4 bits "
            "(`examples/real_model/fetch.py`), float32, two cores. A seed is"
        ),
        (
            "another selection of rows, another order and other samples. ±: one standard error "
            "of the difference; without it, the same"
        ),
        (
            "rows are measured before and after. Seconds and memory are those of the training "
            "command with all its processes; memory"
        ),
        "that processes share counts once.",
        "",
        (
            "| run | seed | measured on held-out rows | before → after | learned | "
            "curve | seconds | GiB |"
        ),
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for run in runs:
        change = f"{run.before:.3f} → {run.after:.3f}" + (
            f" ± {run.error:.3f}" if run.error else ""
        )
        curve = f"`{run.curve_of}` {run.curve[0]:.3g} {sparkline(run.curve)} {run.curve[-1]:.3g}"
        learned = "yes" if run.learned else "**no**"
        cells = [
            run.name,
            run.seed,
            run.measured,
            change,
            learned,
            curve,
            f"{run.seconds:.0f}",
            f"{run.peak_gib:.1f}",
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    for name in dict.fromkeys(run.name for run in runs):
        seeds = [run for run in runs if run.name == name]
        lines += ["", f"## {name}", "", f"`{seeds[0].command}`", *_answer_table(seeds)]
    return "\n".join(lines) + "\n"


def _answer_table(seeds: Sequence[RealRun]) -> list[str]:
    """Return a table with the answers before training and after training with each seed."""
    if not seeds[0].answers:
        return []
    heads = ["prompt", "before", *(f"after, seed {run.seed}" for run in seeds)]
    lines = ["", "| " + " | ".join(heads) + " |", "| --- " * len(heads) + "|"]
    for answers in zip(*(run.answers for run in seeds), strict=True):
        texts = [answers[0].prompt, answers[0].before, *(each.after for each in answers)]
        lines.append("| " + " | ".join(map(_cell, texts)) + " |")
    return lines


def _cell(text: str) -> str:
    """Return a text as a one-line table cell, with table and markup characters escaped."""
    for sign, escaped in (
        ("&", "&amp;"),
        ("<", "&lt;"),
        ("|", "\\|"),
        ("*", "\\*"),
        ("\n", "<br>"),
    ):
        text = text.replace(sign, escaped)
    return text


def write_page() -> None:
    """Write the page from the records."""
    PAGE.write_text(page(read_runs()), encoding="utf-8")
