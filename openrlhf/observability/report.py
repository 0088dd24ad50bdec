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
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

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

HUGE = 1e100  # a number beyond it only says that something broke
SAMPLE_PAIRS = 4
SHOWN_ERRORS = 10
MORE_PANELS = 60
MOST_TILES = 6
SHOWN = toml_beside(__file__)


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One chart and its words. `last`: the newest value of each curve, by the curve's label."""

    title: str
    unit: str
    definition: str
    last: Mapping[str, str]
    chart: Chart


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Pairs of samples, earlier and later, with a `caption` that says which; and the newest samples
    that have an error.
    """

    caption: str
    pairs: Sequence[tuple[Row | None, Row | None]]
    errors: Sequence[Row]
    error_count: int


@dataclass(frozen=True, kw_only=True)
class StageView:
    """What the page shows of a stage. `tiles`: label, number at the beginning, number at the end."""

    facts: Sequence[str]
    tiles: Sequence[tuple[str, str, str]]
    panels: Sequence[Panel]
    more: Sequence[Panel]
    notices: Sequence[str]
    samples: Samples
    texts: str
    config: str


def report_run(folder: Path) -> Path:
    """Write `folder`/report.html about the run in `folder`. Returns its path."""
    name = folder.resolve().name
    return write_report(folder / REPORT, {name: folder}, title=name)


def write_report(
    path: Path,
    stages: Mapping[str, Path],
    *,
    title: str,
    tables: Sequence[Sequence[Sequence[object]]] = (),
) -> Path:
    """Write the page about `stages`: the run folder of each, by name, in their order. Returns
    `path`.

    `tables`: for the top of the page; the rows of each, its column heads first, e.g.
    [["", "before", "after"], ["pass@1", 0.41, 0.62]].
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    page = _ENVIRONMENT.get_template("report.html.jinja").render(
        title=title,
        written=time.strftime("%Y-%m-%d %H:%M"),
        tables=tables,
        stages=[(name, folder, read_stage(folder)) for name, folder in stages.items()],
        cell=_cell,
        charts=charts,
        link=lambda folder: (
            os.path.relpath(own, path.parent) if (own := folder / REPORT).exists() else ""
        ),
    )
    write_atomically(path, page)
    return path


def read_stage(folder: Path) -> StageView:
    """Read the run folder of a stage."""
    rows = list(read_lines(folder / METRICS))
    series = read_series(rows)
    samples = read_samples(read_lines(folder / SAMPLES))
    panels, used = [], set[str]()
    for title, patterns in SHOWN["panels"].items():
        names = [
            name for name in sorted(series) if re.fullmatch(patterns, name) and name not in used
        ]
        if names:
            panels.append(make_panel(title, names, series))
            used.update(names)
    rest = [name for name in sorted(series) if name not in used and len(series[name]) > 1]
    config = next((path for name in (RESOLVED, CONFIG) if (path := folder / name).exists()), None)
    return StageView(
        facts=_facts(rows),
        tiles=make_tiles(series),
        panels=panels,
        more=[make_panel(name, [name], series) for name in rest[:MORE_PANELS]],
        notices=[*notices_of(rows), *_failures(series, samples)],
        samples=samples,
        texts=_read(folder / TEXTS),
        config=_read(config) if config else "",
    )


def read_series(rows: Iterable[Row]) -> Series:
    """The finite values of each metric by step. If a step was logged twice, the later number
    counts.
    """
    points: dict[str, dict[int, float]] = {}
    for row in rows:
        for name, value in row.items():
            if (
                name not in ("step", "time")
                and isinstance(value, int | float)
                and abs(value) < HUGE
            ):
                points.setdefault(name, {})[row["step"]] = float(value)
    return {name: sorted(curve.items()) for name, curve in points.items()}


def read_samples(rows: Iterable[Row]) -> Samples:
    """What the report shows of samples.jsonl, which may be larger than memory.

    Pairs are of the same prompt: of evaluations, else of training steps that drew a prompt of the
    first step again. If there is no such prompt, samples of the first and of the latest step stand
    side by side.
    """
    errors: deque[Row] = deque(maxlen=SHOWN_ERRORS)
    error_count = 0
    # The first key says whether it is an evaluation, the second is the prompt.
    first: dict[bool, dict[str, Row]] = {True: {}, False: {}}  # samples of the first step
    again: dict[bool, dict[str, Row]] = {
        True: {},
        False: {},
    }  # the newest samples of the same prompts
    latest: dict[str, Row] = {}  # samples of the newest training step
    for row in rows:
        kind, prompt = bool(row.get("evaluation")), str(row.get("prompt"))
        if row.get("error"):
            errors.append(row)
            error_count += 1
        elif row["step"] == next(iter(first[kind].values()), row)["step"]:
            first[kind].setdefault(prompt, row)
        else:
            if prompt in first[kind] and again[kind].get(prompt, {}).get("step") != row["step"]:
                again[kind][prompt] = row
            if not kind:
                latest = latest if row["step"] == next(iter(latest.values()), row)["step"] else {}
                latest.setdefault(prompt, row)
    kind = bool(again[True])
    if again[kind]:
        caption = f"{'evaluation' if kind else 'training'} prompts, the first and the newest sample of each"
        pairs = [(first[kind][prompt], row) for prompt, row in again[kind].items()]
    else:
        caption = (
            "of the first and of the newest step; no prompt of the first step was drawn again"
            if latest
            else ""
        )
        earlier = list((first[False] or first[True]).values())
        if latest:
            pairs = list(zip_longest(earlier, latest.values()))
        else:
            pairs = list(
                zip_longest(earlier[0::2], earlier[1::2])
            )  # of one step: two beside each other
    return Samples(
        caption=caption, pairs=pairs[:SAMPLE_PAIRS], errors=list(errors), error_count=error_count
    )


def make_panel(title: str, names: Sequence[str], series: Series) -> Panel:
    """The chart of the metrics `names` of one unit; unit and definition come from the glossary."""
    specs = [spec for name in names if (spec := find_spec(name))]
    return Panel(
        title=title,
        unit=specs[0].unit if specs else "",
        definition=" ".join(dict.fromkeys(spec.definition for spec in specs)),
        last={short_label(name): compact(series[name][-1][1]) for name in names},
        chart=draw([series[name] for name in names]),
    )


def main_numbers(series: Series) -> list[tuple[str, float, float]]:
    """Beginning and end of the numbers that a stage is judged by, by name.

    A number of every step is averaged over the first and the last twentieth of its steps; an
    evaluation is not.
    """
    found: list[tuple[str, float, float]] = []
    for pattern in SHOWN["tiles"]:
        for name in sorted(name for name in series if re.fullmatch(pattern, name)):
            numbers = [value for _, value in series[name]]
            few = averaged_steps(name, series)
            first, last = sum(numbers[:few]) / few, sum(numbers[-few:]) / few
            found.append((name, first, last))
    return found


def make_tiles(series: Series) -> list[tuple[str, str, str]]:
    """Return the tiles of the first main numbers. The label of a mean says how many steps it is of."""
    tiles: list[tuple[str, str, str]] = []
    for name, first, last in main_numbers(series)[:MOST_TILES]:
        label, count = short_label(name), averaged_steps(name, series)
        if count > 1:
            label += f", means of the first and last {count} steps"
        tiles.append((label, compact(first), compact(last)))
    return tiles


def averaged_steps(name: str, series: Series) -> int:
    """Return over how many steps at each end a main number is averaged: a twentieth of all; one for
    an evaluation.
    """
    if name.startswith("eval/"):
        return 1
    return max(1, len(series[name]) // 20)


def short_label(name: str) -> str:
    """A metric's name for people: `train/total_length` is "total length"."""
    if not name.startswith("eval/"):
        return name.partition("/")[2].replace("_", " ")
    label = evaluation_label(name)
    return label if "pass@" in label else f"eval {label}"


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _cell(value: object) -> str:
    return "–" if value is None else compact(value) if isinstance(value, float) else str(value)


def _facts(rows: Sequence[Row]) -> list[str]:
    times = [row["time"] for row in rows if isinstance(row.get("time"), int | float)]
    if not times:
        return []
    steps = max(row["step"] for row in rows)
    return [
        f"{steps:,} step{'s' * (steps != 1)}",
        f"{clock_time(max(times) - min(times))} from first to last line",
        time.strftime("began %Y-%m-%d %H:%M", time.localtime(min(times))),
    ]


def _failures(series: Series, samples: Samples) -> list[str]:
    failed = sum(value for _, value in series.get("train/failed_episodes", []))
    counts = {
        "Failed episodes, dropped": failed,
        "Logged episodes with an error": samples.error_count,
    }
    return [f"{what}: {count:,.0f}" for what, count in counts.items() if count]


_ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
)
