"""report.html: one self-contained page about a run, or about the stages of a pipeline.

Everything comes from run folders, so a report can be written while a run goes on, after it was
killed, or on another machine. The page needs no network. Missing or empty files leave gaps.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from openrlhf.observability.charts import Line, downsample, draw
from openrlhf.observability.glossary import find_spec
from openrlhf.observability.lines import clock_time, compact
from openrlhf.observability.page import PAGE
from openrlhf.observability.run_folder import CONFIG, METRICS, REPORT, SAMPLES, read_lines

Row = dict[str, Any]  # one line of a .jsonl file
Series = dict[str, list[tuple[int, float]]]  # (step, value) by metric name

HUGE = 1e100  # beyond it a number says only that something broke
SAMPLE_PAIRS = 4
SHOWN_ERRORS = 10
MORE_PANELS = 60


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One run of a pipeline: its name in the report, and its run folder."""

    name: str
    folder: Path


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One chart and its words. `last` are the newest values, in the order of `labels`."""

    title: str
    unit: str
    definition: str
    labels: Sequence[str]
    last: Sequence[str]
    chart: Markup


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One number at the head of a stage: where it began and where it ended."""

    label: str
    first: str
    last: str


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Episodes of the first and the last logged step, and the newest ones that have an error."""

    pairs: Sequence[tuple[Row | None, Row | None]]
    first_step: int | None
    last_step: int | None
    errors: Sequence[Row]
    error_count: int


@dataclass(frozen=True, kw_only=True)
class StageView:
    """What the page shows of a stage."""

    name: str
    anchor: str
    folder: str
    facts: Sequence[str]
    tiles: Sequence[Tile]
    panels: Sequence[Panel]
    more: Sequence[Panel]
    failures: Sequence[str]
    samples: Samples
    config: str


def report_run(folder: Path | str) -> Path:
    """Write `folder`/report.html about the run in `folder`. Returns its path."""
    folder = Path(folder)
    name = folder.resolve().name
    return write_report(folder / REPORT, [Stage(name=name, folder=folder)], title=name)


def write_report(
    path: Path | str, stages: Sequence[Stage], *, title: str, summary_rows: Sequence[Sequence[object]] = ()
) -> Path:
    """Write the page about `stages`, in their order. Returns `path`.

    `summary_rows`: a table for the top of the page, its column heads first, e.g.
    [["", "before", "after"], ["pass@1", 0.41, 0.62]].
    """
    page = _TEMPLATE.render(
        title=title,
        written=time.strftime("%Y-%m-%d %H:%M"),
        summary=[[_cell(value) for value in row] for row in summary_rows],
        stages=[read_stage(stage, index) for index, stage in enumerate(stages)],
    )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(path.name + ".new")
    aside.write_text(page, encoding="utf-8", errors="replace")
    return aside.replace(path)


def read_stage(stage: Stage, index: int = 0) -> StageView:
    """Read the run folder of a stage. `index` makes its anchor on the page unique."""
    rows = list(read_lines(stage.folder / METRICS))
    series, broken = read_series(rows)
    samples = read_samples(read_lines(stage.folder / SAMPLES))
    panels, used = [], set[str]()
    for title, patterns in _PANELS:
        names = [n for p in patterns for n in sorted(series) if re.fullmatch(p, n)]
        names = [name for name in names if name not in used]
        if names:
            panels.append(make_panel(title, names, series))
            used.update(names)
    rest = [name for name in sorted(series) if name not in used and len(series[name]) > 1]
    config = stage.folder / CONFIG
    return StageView(
        name=stage.name,
        anchor=f"stage-{index}",
        folder=str(stage.folder),
        facts=_facts(rows),
        tiles=make_tiles(series),
        panels=panels,
        more=[make_panel(name, [name], series) for name in rest[:MORE_PANELS]],
        failures=_failures(series, broken, samples),
        samples=samples,
        config=config.read_text(encoding="utf-8", errors="replace") if config.exists() else "",
    )


def read_series(rows: Iterable[Row]) -> tuple[Series, dict[str, int]]:
    """The curve of each metric by step, and how often each was not a finite number.

    Where a step was logged twice, the later number counts.
    """
    points: dict[str, dict[int, float]] = {}
    broken: dict[str, int] = {}
    for row in rows:
        for name, value in row.items():
            if name in ("step", "time"):
                continue
            if isinstance(value, int | float) and abs(value) < HUGE:
                points.setdefault(name, {})[row["step"]] = float(value)
            else:
                broken[name] = broken.get(name, 0) + 1
    return {name: sorted(curve.items()) for name, curve in points.items()}, broken


def read_samples(rows: Iterable[Row]) -> Samples:
    """What the report shows of samples.jsonl, which may be larger than memory.

    Before and after are paired by prompt where both steps sampled it, else in logged order.
    """
    first: dict[str, Row] = {}
    last: dict[str, Row] = {}
    steps: list[int] = []  # first and newest
    errors: deque[Row] = deque(maxlen=SHOWN_ERRORS)
    error_count = 0
    for row in rows:
        if row.get("error"):
            errors.append(row)
            error_count += 1
            continue
        if not steps or row["step"] != steps[-1]:
            steps = [*steps[:1], row["step"]]
            last = {}
        side = first if len(steps) == 1 else last
        side.setdefault(str(row.get("prompt")), row)
    both = [(row, last[prompt]) for prompt, row in first.items() if prompt in last]
    pairs = both or list(zip_longest(first.values(), last.values()))
    return Samples(
        pairs=pairs[:SAMPLE_PAIRS],
        first_step=steps[0] if steps else None,
        last_step=steps[-1] if len(steps) > 1 else None,
        errors=list(errors),
        error_count=error_count,
    )


def make_panel(title: str, names: Sequence[str], series: Series) -> Panel:
    """The chart of the metrics `names` of one unit; unit and definition come from the glossary."""
    specs = [spec for name in names if (spec := find_spec(name))]
    labels = [short_label(name) for name in names]
    lines = [Line(label=label, points=downsample(series[name])) for label, name in zip(labels, names, strict=True)]
    return Panel(
        title=title,
        unit=specs[0].unit if specs else "",
        definition=" ".join(dict.fromkeys(spec.definition for spec in specs)),
        labels=labels,
        last=[compact(series[name][-1][1]) for name in names],
        chart=draw(lines, label=f"{title}: {', '.join(labels)}"),
    )


def make_tiles(series: Series) -> list[Tile]:
    """Beginning and end of what a stage is judged by: evaluations as they are, else means.

    A number of every step is averaged over the first and the last twentieth of its steps.
    """
    tiles: list[Tile] = []
    for pattern in _TILES:
        for name in sorted(name for name in series if re.fullmatch(pattern, name)):
            numbers = [value for _, value in series[name]]
            few = 1 if name.startswith("eval/") else max(1, len(numbers) // 20)
            first, last = sum(numbers[:few]) / few, sum(numbers[-few:]) / few
            tiles.append(Tile(label=short_label(name), first=compact(first), last=compact(last)))
    return tiles[:6]


def short_label(name: str) -> str:
    """A metric's name for people: `eval/eval_gsm8k_pass4` is "gsm8k pass@4"."""
    name = re.sub(r"^\w+/(eval[_ ])?", "eval " if name.startswith("eval/") else "", name)
    return re.sub(r"^eval (.+)_pass(\d+)$", r"\1 pass@\2", name).replace("_", " ")


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return compact(value) if isinstance(value, float) else str(value)


def _facts(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    times = [row["time"] for row in rows if isinstance(row.get("time"), int | float)]
    steps = max(row["step"] for row in rows)
    facts = [f"{steps:,} step{'s' * (steps != 1)}"]
    if times:
        facts.append(f"{clock_time(max(times) - min(times))} from first to last line")
        facts.append(time.strftime("began %Y-%m-%d %H:%M", time.localtime(min(times))))
    return facts


def _failures(series: Series, broken: dict[str, int], samples: Samples) -> list[str]:
    failures: list[str] = []
    if failed := sum(value for _, value in series.get("train/failed_episodes", [])):
        failures.append(f"failed episodes, dropped: {failed:,.0f}")
    if skipped := max((value for _, value in series.get("train/nonfinite_steps", [])), default=0):
        failures.append(f"optimizer steps skipped, loss or gradient not finite: {skipped:,.0f}")
    for name, count in sorted(broken.items()):
        failures.append(f"values of {name} that are not finite: {count:,}")
    if samples.error_count:
        failures.append(f"logged episodes with an error: {samples.error_count:,}")
    return failures


_ENVIRONMENT = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
_ENVIRONMENT.filters["cell"] = _cell
_TEMPLATE = _ENVIRONMENT.from_string(PAGE)

_TILES = (
    r"eval/eval_.+_pass\d+",
    r"train/reward",
    r"eval/(eval gpt_loss|eval_loss|eval prm_loss)",
    r"eval/(acc_mean|eval acc)",
    r"train/(gpt_loss|loss|kto_loss|prm_loss)",
    r"train/acc",
    r"train/kl",
    r"train/response_length",
)

_TIMES = ("step_total", "generation", "make_experience", "ppo_train", "broadcast")

# title, and the metrics it shows, all of one unit
_PANELS = (
    ("Pass rate", (r"eval/eval_.+_pass\d+",)),
    ("Reward", (r"train/reward", r"rollout/reward_mean")),
    ("Loss", (r"train/(gpt_loss|loss|kto_loss|prm_loss)", r"eval/(eval (gpt|prm)_loss|eval_loss)")),
    ("Accuracy", (r"train/acc", r"eval/(acc_mean|eval acc)")),
    ("Rewards of chosen and rejected", (r"train/(chosen|reject)_reward",)),
    ("KL to the reference", (r"train/kl",)),
    ("Spread of rewards of a prompt", (r"train/group_reward_std",)),
    ("Response length", (r"train/response_length", r"eval/eval_response_length_mean")),
    ("Entropy", (r"train/entropy_loss",)),
    ("Truncated", (r"train/truncated", r"eval/eval_truncated_rate")),
    ("Policy loss", (r"train/policy_loss",)),
    ("Clipped tokens", (r"train/ppo_clip_ratio",)),
    ("Log-prob gap, mean", (r"train/logprob_gap_mean", r"train/vllm_kl")),
    ("Log-prob gap, largest", (r"train/logprob_gap_max",)),
    ("Critic loss", (r"train/critic_loss",)),
    ("Gradient norm", (r"train/(actor_|critic_)?grad_norm",)),
    ("Learning rate", (r"train/(actor_|critic_)?lr",)),
    ("Time of a step", tuple(f"timing/{part}" for part in _TIMES)),
    ("Throughput", (r"timing/tokens_per_second",)),
)
