"""report.html: one self-contained page about a run, or about the stages of a pipeline.

Everything comes from run folders, so a report can be written while a run is still training, after
it was killed, or on another machine. The page needs no network. Missing or empty files leave gaps.
The page itself is the template `report.html.jinja`.
"""

import os
import re
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader

from openrlhf.config.flags import toml_beside
from openrlhf.files import write_atomically
from openrlhf.observability import charts
from openrlhf.observability.charts import Chart, draw
from openrlhf.observability.glossary import find_spec
from openrlhf.observability.health import notices_of
from openrlhf.observability.lines import clock_time, compact, evaluation_label
from openrlhf.observability.run_folder import (
    CONFIG,
    METRICS,
    REPORT,
    RESOLVED,
    SAMPLES,
    TEXTS,
    read_lines,
)

Row = dict[str, Any]  # one line of a .jsonl file
Series = dict[str, list[tuple[int, float]]]  # (step, value) by metric name

HUGE = 1e100  # a larger number only shows that something broke
MAX_SAMPLE_PAIRS = 4
MAX_ERRORS = 10
MAX_MORE_PANELS = 60
MAX_TILES = 6
SHOWN = toml_beside(__file__)


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One chart and its texts. `last` has the newest value of each curve, by the curve's label."""

    title: str
    unit: str
    definition: str
    last: Mapping[str, str]
    chart: Chart


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Pairs of an earlier and a later sample, and the newest samples that have an error.

    `caption` says which samples the pairs consist of.
    """

    caption: str
    pairs: Sequence[tuple[Row | None, Row | None]]
    errors: Sequence[Row]
    error_count: int


class MainNumber(NamedTuple):
    """A metric that a stage is judged by, with its value at the beginning and at the end."""

    name: str
    first: float
    last: float


class Tile(NamedTuple):
    """A main number as the page shows it."""

    label: str
    first: str
    last: str


@dataclass(frozen=True, kw_only=True)
class StageView:
    """Contents of the page's section about a stage."""

    facts: Sequence[str]
    tiles: Sequence[Tile]
    panels: Sequence[Panel]
    more: Sequence[Panel]
    notices: Sequence[str]
    samples: Samples
    texts: str
    config: str


def report_run(folder: Path) -> Path:
    """Write `folder`/report.html about the run in `folder`. Returns the path of the page."""
    name = folder.resolve().name
    return write_report(folder / REPORT, {name: folder}, title=name)


def write_report(
    path: Path,
    stages: Mapping[str, Path],
    *,
    title: str,
    tables: Sequence[Sequence[Sequence[object]]] = (),
) -> Path:
    """Write the page about `stages`, the run folder of each stage by its name. Returns `path`.

    `tables`: the rows of each table at the top of the page, column headings first, e.g.
    [["", "before", "after"], ["pass@1", 0.41, 0.62]].
    """

    def link_to_report(folder: Path) -> str:
        report = folder / REPORT
        if not report.exists():
            return ""
        return os.path.relpath(report, path.parent)

    path.parent.mkdir(parents=True, exist_ok=True)
    page = _ENVIRONMENT.get_template("report.html.jinja").render(
        title=title,
        written=time.strftime("%Y-%m-%d %H:%M"),
        tables=tables,
        folders=stages,
        views={name: read_stage(folder) for name, folder in stages.items()},
        cell=_format_cell,
        charts=charts,
        link=link_to_report,
    )
    write_atomically(path, page)
    return path


def read_stage(folder: Path) -> StageView:
    """Read the run folder of a stage."""
    rows = list(read_lines(folder / METRICS))
    series = read_series(rows)
    samples = read_samples(read_lines(folder / SAMPLES))
    panels: list[Panel] = []
    shown: set[str] = set()
    for title, pattern in SHOWN["panels"].items():
        names = [name for name in _matching(pattern, series) if name not in shown]
        if names:
            panels.append(make_panel(title, names, series))
            shown.update(names)
    more: list[Panel] = []
    for name in sorted(series):
        if name not in shown and len(series[name]) > 1 and len(more) < MAX_MORE_PANELS:
            more.append(make_panel(name, [name], series))
    config = folder / RESOLVED
    if not config.exists():
        config = folder / CONFIG
    return StageView(
        facts=_facts(rows),
        tiles=make_tiles(series),
        panels=panels,
        more=more,
        notices=[*notices_of(rows), *_failures(series, samples)],
        samples=samples,
        texts=_read(folder / TEXTS),
        config=_read(config),
    )


def _matching(pattern: str, series: Series) -> list[str]:
    """Return the metrics whose whole name matches the pattern, sorted."""
    return [name for name in sorted(series) if re.fullmatch(pattern, name)]


def read_series(rows: Iterable[Row]) -> Series:
    """Return the finite values of each metric by step.

    If a step was logged twice, the later number replaces the earlier one.
    """
    points: dict[str, dict[int, float]] = {}
    for row in rows:
        for name, value in row.items():
            if name in ("step", "time") or not isinstance(value, int | float):
                continue
            if abs(value) < HUGE:
                points.setdefault(name, {})[row["step"]] = float(value)
    return {name: sorted(curve.items()) for name, curve in points.items()}


@dataclass
class _PromptHistory:
    """Samples of a run by prompt; of each prompt and step only the first sample is kept."""

    first: dict[str, Row] = field(default_factory=dict[str, Row])  # of the first step
    repeated: dict[str, Row] = field(default_factory=dict[str, Row])  # newest, of the same prompts
    latest: dict[str, Row] = field(default_factory=dict[str, Row])  # of the newest later step

    def add(self, row: Row) -> None:
        """Add the next sample of samples.jsonl."""
        prompt = str(row.get("prompt"))
        if not self.first or row["step"] == _step_of(self.first):
            self.first.setdefault(prompt, row)
            return
        if prompt in self.first:
            known = self.repeated.get(prompt)
            if known is None or known["step"] != row["step"]:
                self.repeated[prompt] = row
        if self.latest and row["step"] != _step_of(self.latest):
            self.latest = {}
        self.latest.setdefault(prompt, row)

    def repeated_pairs(self) -> list[tuple[Row | None, Row | None]]:
        """Return the first and the newest sample of each prompt that was drawn again."""
        return [(self.first[prompt], row) for prompt, row in self.repeated.items()]


def _step_of(samples: Mapping[str, Row]) -> int:
    """Return the step of samples that all have the same step."""
    return next(iter(samples.values()))["step"]


def read_samples(rows: Iterable[Row]) -> Samples:
    """Return the contents of samples.jsonl that the report shows. The file may exceed the memory.

    The two samples of a pair have the same prompt: one of the evaluations, or else one of the first
    training step that was drawn again. If there is no such prompt, samples of the first and of the
    newest step are paired.
    """
    errors: deque[Row] = deque(maxlen=MAX_ERRORS)
    error_count = 0
    evaluation = _PromptHistory()
    training = _PromptHistory()
    for row in rows:
        if row.get("error"):
            errors.append(row)
            error_count += 1
        elif row.get("evaluation"):
            evaluation.add(row)
        else:
            training.add(row)
    caption = ""
    if evaluation.repeated:
        caption = "evaluation prompts: first and newest sample of each"
        pairs = evaluation.repeated_pairs()
    elif training.repeated:
        caption = "training prompts: first and newest sample of each"
        pairs = training.repeated_pairs()
    elif training.latest:
        caption = "first and newest step; no prompt of the first step was drawn again"
        pairs = list(zip_longest(training.first.values(), training.latest.values()))
    else:
        single_step = list((training.first or evaluation.first).values())
        pairs = list(zip_longest(single_step[0::2], single_step[1::2]))
    return Samples(
        caption=caption,
        pairs=pairs[:MAX_SAMPLE_PAIRS],
        errors=list(errors),
        error_count=error_count,
    )


def make_panel(title: str, names: Sequence[str], series: Series) -> Panel:
    """Return the chart of metrics of one unit, with unit and definitions from the glossary."""
    unit = ""
    definitions: list[str] = []
    for name in names:
        spec = find_spec(name)
        if spec is None:
            continue
        if not definitions:
            unit = spec.unit
        if spec.definition not in definitions:
            definitions.append(spec.definition)
    newest: dict[str, str] = {}
    for name in names:
        _, value = series[name][-1]
        newest[short_label(name)] = compact(value)
    return Panel(
        title=title,
        unit=unit,
        definition=" ".join(definitions),
        last=newest,
        chart=draw([series[name] for name in names]),
    )


def main_numbers(series: Series) -> list[MainNumber]:
    """Return the numbers that a stage is judged by, the most important first.

    The numbers of training steps are averaged over the first and the last twentieth of the steps;
    those of evaluations are not averaged.
    """
    found: list[MainNumber] = []
    for pattern in SHOWN["tiles"]:
        for name in _matching(pattern, series):
            values = [value for _, value in series[name]]
            count = averaged_steps(name, series)
            first = sum(values[:count]) / count
            last = sum(values[-count:]) / count
            found.append(MainNumber(name, first, last))
    return found


def make_tiles(series: Series) -> list[Tile]:
    """Return the tiles of the first main numbers. The label of a mean has its number of steps."""
    tiles: list[Tile] = []
    for number in main_numbers(series)[:MAX_TILES]:
        label = short_label(number.name)
        count = averaged_steps(number.name, series)
        if count > 1:
            label += f", means of the first and last {count} steps"
        tiles.append(Tile(label, compact(number.first), compact(number.last)))
    return tiles


def averaged_steps(name: str, series: Series) -> int:
    """Return the number of steps at each end that a main number is averaged over.

    This is a twentieth of all steps, or one for an evaluation.
    """
    if name.startswith("eval/"):
        return 1
    return max(1, len(series[name]) // 20)


def short_label(name: str) -> str:
    """Return a readable name of a metric: "total length" for `train/total_length`."""
    if not name.startswith("eval/"):
        return name.partition("/")[2].replace("_", " ")
    label = evaluation_label(name)
    if "pass@" in label:
        return label
    return f"eval {label}"


def _read(path: Path) -> str:
    if not path.exists():
        return ""
    return path.read_text(encoding="utf-8", errors="replace")


def _format_cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return compact(value)
    return str(value)


def _facts(rows: Sequence[Row]) -> list[str]:
    times: list[float] = []
    for row in rows:
        if isinstance(row.get("time"), int | float):
            times.append(row["time"])
    if not times:
        return []
    last_step = max(row["step"] for row in rows)
    steps = f"{last_step:,} steps"
    if last_step == 1:
        steps = "1 step"
    return [
        steps,
        f"{clock_time(max(times) - min(times))} from first to last line",
        time.strftime("started %Y-%m-%d %H:%M", time.localtime(min(times))),
    ]


def _failures(series: Series, samples: Samples) -> list[str]:
    """Return sentences with the numbers of failed episodes and errors, if there are any."""
    sentences: list[str] = []
    failed = sum(value for _, value in series.get("train/failed_episodes", []))
    if failed:
        sentences.append(f"Failed episodes, dropped: {failed:,.0f}")
    if samples.error_count:
        sentences.append(f"Logged episodes with an error: {samples.error_count:,}")
    return sentences


_ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
)
