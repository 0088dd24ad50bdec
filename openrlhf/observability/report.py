"""report.html: a self-contained page about a run or about the stages of a pipeline.

All content comes from run folders, so a report can be written while a run is training, after it was
killed, or on another machine. The page needs no network access. Missing or empty files leave gaps
in the page. The template is `report.html.jinja`.
"""

import os
import re
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, cast

import yaml
from jinja2 import Environment, FileSystemLoader

from openrlhf.config.options import leaves
from openrlhf.files import write_atomically
from openrlhf.observability.charts import Curve, Line, make_lines
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
    read_notices,
    read_text,
)

Row = dict[str, Any]  # a line of a .jsonl file
Series = dict[str, list[tuple[float, float]]]  # curves by metric

HUGE = 1e100  # a larger value only indicates that training broke down
MAX_SAMPLE_PAIRS = 4
MAX_ERRORS = 10
MAX_MORE_PANELS = 60
MAX_TILES = 6

# Regular expressions for the main metrics of a run, most important first.
# Each expression must match the full name.
MAIN_NUMBERS = (
    r"eval/eval_.+_pass\d+",
    r"train/reward",
    r"eval/(eval gpt_loss|eval_loss|eval prm_loss)",
    r"eval/(acc_mean|eval acc)",
    r"train/(gpt_loss|loss|kto_loss|prm_loss)",
    r"train/acc",
    r"train/kl",
    r"train/response_length",
)
# Settings shown below the title, and the flags that set them in different commands.
SETTINGS = {
    "advantages": ("algo.advantage.estimator",),
    "model": ("actor.model_name_or_path", "model.model_name_or_path"),
    "data": ("data.prompt_dataset", "data.dataset"),
}
# Panel titles, each with a regular expression for metrics that share a unit.
PANELS = {
    "Pass rate": r"eval/eval_.+_pass\d+",
    "Reward": r"train/reward|rollout/reward_mean",
    "Loss": r"train/(gpt_loss|loss|kto_loss|prm_loss)|eval/(eval (gpt|prm)_loss|eval_loss)",
    "Accuracy": r"train/acc|eval/(acc_mean|eval acc)",
    "Rewards of chosen and rejected answers": r"train/(chosen|reject)_reward",
    "KL to the reference": r"train/kl",
    "Std. dev. of rewards within a prompt": r"train/group_reward_std",
    "Response length": r"train/response_length|eval/eval_response_length_mean",
    "Entropy": r"train/entropy_loss",
    "Turns and conversations per episode": r"rollout/(turns|conversations)_mean",
    "Truncated": r"train/truncated|eval/eval_truncated_rate",
    "Policy loss": r"train/policy_loss",
    "Clipped tokens": r"train/ppo_clip_ratio",
    "Log-prob gap, mean": r"train/(logprob_gap_mean|vllm_kl)",
    "Log-prob gap, maximum": r"train/logprob_gap_max",
    "Critic loss": r"train/critic_loss",
    "Gradient norm": r"train/(actor_|critic_)?grad_norm",
    "Learning rate": r"train/(actor_|critic_)?lr",
    "Time per step": r"timing/(step_total|generation|make_experience|ppo_train|broadcast)",
    "Throughput": r"timing/tokens_per_second",
}


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A chart with its title, unit and definition."""

    title: str
    unit: str
    definition: str
    lines: Sequence[Line]


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Pairs of an earlier and a later sample, together with the newest errors.

    If there is only one step, no pair has a later sample. `caption` describes which samples are
    paired.
    """

    caption: str
    pairs: Sequence[tuple[Row | None, Row | None]]
    errors: Sequence[str]
    error_count: int


class MainNumber(NamedTuple):
    """A main metric of a stage, with its values at the beginning and at the end.

    Each value is a mean over `steps` steps.
    """

    name: str
    first: float
    last: float
    steps: int


@dataclass(frozen=True, kw_only=True)
class StageView:
    """The contents of a stage's section on the page."""

    folder: Path
    command: Sequence[str]
    settings: Sequence[str]
    facts: Sequence[str]
    series: Series
    tiles: Sequence[MainNumber]
    panels: Sequence[Panel]
    more: Sequence[Panel]
    notices: Sequence[str]
    samples: Samples
    texts: str
    config: str


def report_run(folder: Path) -> Path:
    """Write `folder`/report.html about the run in `folder`, and return the page's path."""
    name = folder.resolve().name
    return write_report(folder / REPORT, {name: folder}, title=name)


def write_report(
    path: Path,
    stages: Mapping[str, Path],
    *,
    title: str,
    tables: Sequence[Sequence[Sequence[object]]] = (),
) -> Path:
    """Write the page about `stages`, which maps stage names to run folders. Returns `path`.

    `tables` contains the rows of the tables at the top of the page. A table starts with its column
    headings, e.g. [["", "before", "after"], ["pass@1", 0.41, 0.62]].
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    views = {name: read_stage(folder) for name, folder in stages.items()}
    links: dict[str, str] = {}
    for name, folder in stages.items():
        if (folder / REPORT).exists():
            links[name] = os.path.relpath(folder / REPORT, path.parent)
    page = _ENVIRONMENT.get_template("report.html.jinja").render(
        title=title,
        written=time.strftime("%Y-%m-%d %H:%M"),
        tables=tables,
        comparison=compare({name: view.series for name, view in views.items()}),
        views=views,
        links=links,
        cell=_format_cell,
        label=short_label,
    )
    write_atomically(path, page)
    return path


def read_stage(folder: Path) -> StageView:
    """Read a stage's run folder."""
    rows = list(read_lines(folder / METRICS))
    series = read_series(rows)
    samples = read_samples(read_lines(folder / SAMPLES))
    panels: list[Panel] = []
    shown: set[str] = set()
    for title, pattern in PANELS.items():
        names = [name for name in _matching(pattern, series) if name not in shown]
        if names:
            curves = {short_label(name): series[name] for name in names}
            panels.append(make_panel(title, names, curves))
            shown.update(names)
    more: list[Panel] = []
    for name in sorted(series.keys() - shown):
        if len(series[name]) > 1:
            more.append(make_panel(name, [name], {short_label(name): series[name]}))
    stored = read_notices(folder)
    given = read_text(folder / CONFIG)
    config = read_text(folder / RESOLVED) or given
    comments = [line[2:] for line in given.splitlines() if line.startswith("# ")]
    command = comments[:1]
    for path, value in read_flags(given).items():
        command.append(f"--{path} {value}")
    return StageView(
        folder=folder,
        command=command,
        settings=read_settings(config),
        facts=_facts(rows),
        series=series,
        tiles=main_numbers(series)[:MAX_TILES],
        panels=panels,
        more=more[:MAX_MORE_PANELS],
        notices=[*comments[1:], *notices_of(rows, stored), *_failures(series, samples)],
        samples=samples,
        texts=read_text(folder / TEXTS),
        config=config,
    )


def read_settings(config: str) -> list[str]:
    """Return the main settings of a YAML configuration, e.g. ["model gpt2", "data rows.jsonl"].

    Settings that are missing from the configuration are omitted.
    """
    values = read_flags(config)
    settings: list[str] = []
    for label, flags in SETTINGS.items():
        settings += [f"{label} {values[flag]}" for flag in flags if values.get(flag)]
    return settings


def read_flags(config: str) -> dict[str, Any]:
    """Return a YAML configuration's values by flag, or an empty dict if the YAML is not valid."""
    try:
        tree = yaml.safe_load(config)
    except yaml.YAMLError:
        return {}
    if not isinstance(tree, dict):  # for example, an empty file
        return {}
    return dict(leaves(cast("dict[Any, Any]", tree), {}, ""))


def compare(runs: Mapping[str, Series]) -> list[Panel]:
    """Return a panel for each main metric logged by several runs, with one line per run."""
    logged = set[str]().union(*runs.values())
    panels: list[Panel] = []
    for pattern in MAIN_NUMBERS:
        for name in _matching(pattern, logged):
            curves = {run: series[name] for run, series in runs.items() if name in series}
            if len(curves) > 1:
                panels.append(make_panel(short_label(name), [name], curves))
    return panels


def _matching(pattern: str, names: Iterable[str]) -> list[str]:
    """Return, in sorted order, the names that match the entire pattern."""
    return [name for name in sorted(names) if re.fullmatch(pattern, name)]


def read_series(rows: Iterable[Row]) -> Series:
    """Return the curve of each metric, without non-finite values.

    If a step was logged twice, the later value replaces the earlier value.
    """
    points: dict[str, dict[float, float]] = {}
    for row in rows:
        for name, value in row.items():
            if name in ("step", "time") or not isinstance(value, int | float):
                continue
            if abs(value) < HUGE:
                points.setdefault(name, {})[row["step"]] = float(value)
    return {name: sorted(curve.items()) for name, curve in points.items()}


class _PromptHistory:
    """Samples of a run by prompt. Only the first sample of each prompt and step is kept."""

    def __init__(self) -> None:
        self.first: dict[str, Row] = {}  # samples of the first step
        self.repeated: dict[str, Row] = {}  # newest samples of the same prompts
        self.latest = self.first  # samples of the newest step
        self._step: int | None = None

    def add(self, row: Row) -> None:
        """Add the next sample of samples.jsonl."""
        if self.first and row["step"] != self._step:
            self.latest = {}
        self._step = row["step"]
        prompt = str(row.get("prompt"))
        if prompt in self.latest:
            return
        if prompt in self.first:
            self.repeated[prompt] = row
        self.latest[prompt] = row


def read_samples(rows: Iterable[Row]) -> Samples:
    """Select the samples and errors to be shown in the report.

    The `rows` are read as a stream, because samples.jsonl may be larger than memory.
    """
    errors: deque[str] = deque(maxlen=MAX_ERRORS)
    error_count = 0
    evaluation = _PromptHistory()
    training = _PromptHistory()
    for row in rows:
        if row.get("error"):
            place = f"step {row['step']}, prompt {row.get('prompt_index')}"
            errors.append(f"{place}, sample {row.get('sample_index')}\n\n{row['error']}")
            error_count += 1
        elif row.get("evaluation"):
            evaluation.add(row)
        else:
            training.add(row)
    caption, pairs = _pair_samples(evaluation, training)
    return Samples(
        caption=caption,
        pairs=pairs[:MAX_SAMPLE_PAIRS],
        errors=errors,
        error_count=error_count,
    )


def _pair_samples(
    evaluation: _PromptHistory, training: _PromptHistory
) -> tuple[str, Sequence[tuple[Row | None, Row | None]]]:
    """Return pairs of an earlier and a later sample, and a caption that describes them.

    Both samples of a pair have the same prompt, if a prompt was sampled again. Otherwise, samples
    of the first and the newest step are paired; if there is only one step, the later sample is
    None.
    """
    for kind, history in (("evaluation", evaluation), ("training", training)):
        if history.repeated:
            pairs = [(history.first[prompt], row) for prompt, row in history.repeated.items()]
            return f"first and newest sample of each {kind} prompt", pairs
    history = training
    if not training.first:
        history = evaluation
    later: Iterable[Row] = ()
    if history.latest is not history.first:
        later = history.latest.values()
    caption = "samples of the first and the newest step; no prompt was sampled twice"
    return caption, list(zip_longest(history.first.values(), later))


def make_panel(title: str, names: Iterable[str], curves: Mapping[str, Curve]) -> Panel:
    """Return a chart of labeled curves, with the unit and definition of each metric in `names`."""
    unit = ""
    definitions: dict[str, None] = {}
    for name in names:
        spec = find_spec(name)
        if spec:
            unit = spec.unit
            definitions[spec.definition] = None
    return Panel(title=title, unit=unit, definition=" ".join(definitions), lines=make_lines(curves))


def main_numbers(series: Series) -> list[MainNumber]:
    """Return the main metrics of a stage, most important first.

    Training metrics are averaged over the first and the last twentieth of the steps; evaluation
    metrics are not averaged.
    """
    found: list[MainNumber] = []
    for pattern in MAIN_NUMBERS:
        for name in _matching(pattern, series):
            values = [value for _, value in series[name]]
            steps = 1
            if not name.startswith("eval/"):
                steps = max(1, len(values) // 20)
            first = fmean(values[:steps])
            found.append(MainNumber(name, first, fmean(values[-steps:]), steps))
    return found


def short_label(name: str) -> str:
    """Return a readable name for a metric, e.g. "total length" for `train/total_length`."""
    if not name.startswith("eval/"):
        return name.partition("/")[2].replace("_", " ")
    label = evaluation_label(name)
    if "pass@" in label:
        return label
    return f"eval {label}"


def _format_cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return compact(value)
    return str(value)


def _facts(rows: Sequence[Row]) -> list[str]:
    times = [row["time"] for row in rows if row.get("time")]
    if not times:
        return []
    last_step = max(row["step"] for row in rows)
    return [
        f"steps: {last_step:,}",
        f"logged for {clock_time(max(times) - min(times))}",
        time.strftime("started %Y-%m-%d %H:%M", time.localtime(min(times))),
    ]


def _failures(series: Series, samples: Samples) -> list[str]:
    """Return sentences that count failed episodes and errors, if any."""
    sentences: list[str] = []
    failed = sum(value for _, value in series.get("train/failed_episodes", []))
    if failed:
        sentences.append(f"Failed and dropped episodes: {failed:,.0f}")
    if samples.error_count:
        sentences.append(f"Logged episodes with an error: {samples.error_count:,}")
    return sentences


_ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
)
