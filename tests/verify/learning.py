"""Records of the learning runs, and the page generated from them.

docs/results/learning.jsonl contains a JSON line for each run and seed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from tests.sources import ROOT

RECORDS = ROOT / "docs" / "results" / "learning.jsonl"
COMMAND = "python -m pytest -m verify tests/verify/test_learning.py"
ENDS = 6  # a curve's start and end values are the means of its first and last sixth
UNCORRECTED = "uncorrected"
CORRECTIONS = ("tis", "tis_paper", "icepop", "seq_mask_tis")
GATES = ("binary_kl",)  # corrections that compare a divergence
BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, kw_only=True)
class LearningRun:
    """One run with one seed."""

    name: str
    seed: int
    flags: str  # the method's flags in docs/algorithms.md, then the task flags that override them
    # Fraction of each step's samples that are correct. Every prompt is used only once.
    solved: list[float]
    pass_at_1: list[float]  # on held-out problems, before and after training
    versions: str
    seconds: float = 0.0
    lag: float = 0.0  # mean age of the samples, in weight versions

    @property
    def gain(self) -> float:
        """Return the change in held-out pass@1 due to training."""
        before, after = self.pass_at_1
        return after - before

    @property
    def first(self) -> float:
        return fmean(self.solved[: len(self.solved) // ENDS])

    @property
    def last(self) -> float:
        return fmean(self.solved[-(len(self.solved) // ENDS) :])


def read_runs(path: Path = RECORDS) -> list[LearningRun]:
    """Return all recorded runs, or none if the file does not exist."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [LearningRun(**json.loads(line)) for line in lines]


def record(run: LearningRun, path: Path = RECORDS) -> None:
    """Record a run, and replace any earlier record with the same name and seed."""
    others = [each for each in read_runs(path) if (each.name, each.seed) != (run.name, run.seed)]
    runs = sorted([*others, run], key=lambda each: (each.name, each.seed))
    path.write_text("".join(json.dumps(asdict(each)) + "\n" for each in runs), encoding="utf-8")


def by_name(runs: Sequence[LearningRun]) -> dict[str, list[LearningRun]]:
    """Return the runs grouped by name, with one run per seed."""
    return {
        name: [run for run in runs if run.name == name]
        for name in dict.fromkeys(run.name for run in runs)
    }


def mean_curve(runs: Sequence[LearningRun]) -> list[float]:
    """Return the mean over seeds at every step that all runs reached."""
    return [fmean(step) for step in zip(*(run.solved for run in runs), strict=False)]


def sparkline(curve: Sequence[float], width: int = 16) -> str:
    """Return a curve as a row of bars that are scaled to its lowest and highest values."""
    edges = [round(i * len(curve) / width) for i in range(width + 1)]
    points = [fmean(curve[a:b]) for a, b in pairwise(edges) if a < b]
    low, span = min(points), max(points) - min(points) or 1.0
    return "".join(
        BARS[min(len(BARS) - 1, int((point - low) / span * len(BARS)))] for point in points
    )


def summary(runs: Sequence[LearningRun]) -> str:
    """Return a one-line summary for docs/algorithms.md.

    The line has each seed's fraction solved at the start and end, the mean curve, and held-out
    pass@1 before and after training.
    """
    seeds = ", ".join(f"{run.first:.2f} → {run.last:.2f}" for run in runs)
    before, after = (fmean(run.pass_at_1[end] for run in runs) for end in (0, 1))
    return f"{seeds} {sparkline(mean_curve(runs))} held out {before:.2f} → {after:.2f}"


def page(runs: Sequence[LearningRun]) -> str:
    """Return the text of docs/results/learning.md."""
    named = by_name(runs)
    seeds = sorted({run.seed for run in runs})
    rows = [
        [
            "run",
            *(f"seed {seed}" for seed in seeds),
            "held-out pass@1",
            "solved by step",
            "seconds",
        ],
        ["---"] * (len(seeds) + 4),
        *([name, *_cells(named[name], seeds)] for name in named),
    ]
    return "\n".join(
        [
            "# What each method learns",
            "",
            f"`{COMMAND}`: {'; '.join(sorted({run.versions for run in runs}))}.",
            "",
            (
                "The demo's task and SFT model (`examples/demo/task.py`), then the flags of "
                "[algorithms.md](../algorithms.md)"
            ),
            "under the run's name. A seed is another task, model and order.",
            "The reward is the share of digits in their place (`tests/verify/digits.py`).",
            (
                "Its cell: share of samples solved in the first and in the last sixth of the "
                "run; no prompt is drawn twice."
            ),
            (
                "pass@1: 400 held-out problems × 4 samples at temperature 1, before → after, "
                "mean over seeds."
            ),
            (
                "Every step, and all flags: `docs/results/learning.jsonl`. The numbers show that "
                "a method works here;"
            ),
            "they do not rank methods: learning rates were not tuned, and the task is tiny.",
            (
                "The corrections and `uncorrected` train asynchronously on samples four versions "
                "old, where there is something"
            ),
            "to correct.",
            "",
            *("| " + " | ".join(row) + " |" for row in rows),
            "",
        ]
    )


def _cells(runs: Sequence[LearningRun], seeds: Sequence[int]) -> list[str]:
    at = {run.seed: f"{run.first:.2f} → {run.last:.2f}" for run in runs}
    before, after = (fmean(run.pass_at_1[end] for run in runs) for end in (0, 1))
    learned = [f"{before:.2f} → {after:.2f}", sparkline(mean_curve(runs))]
    return [
        *(at.get(seed, "") for seed in seeds),
        *learned,
        f"{fmean(run.seconds for run in runs):.0f}",
    ]
