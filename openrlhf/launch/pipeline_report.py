"""The pipeline report page.

The page contains a table with one row per stage, a table with statistics over seeds, and the
content of each stage's report.
"""

from collections.abc import Mapping, Sequence
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

from openrlhf.launch.pipeline_file import Stage
from openrlhf.observability.lines import compact
from openrlhf.observability.report import main_numbers, read_series, short_label, write_report
from openrlhf.observability.run_folder import METRICS, REPORT, read_lines

MAX_NUMBERS = 3  # maximum number of main metrics in a stage's row
# 97.5 % quantiles of Student's t for 1 to 9 degrees of freedom.
# More than 9 degrees of freedom are treated as 9, which makes the intervals slightly too wide.
STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def write_pipeline_report(
    folder: Path, stages: Sequence[Stage], seconds: Mapping[str, float], *, title: str
) -> Path:
    """Write the page to the pipeline's `folder`, and return its path.

    `seconds` maps each stage that has run to its run time.
    """
    table = [["stage", "command", "seconds", "main numbers, first → last"]]
    folders: dict[str, Path] = {}
    groups: dict[str, list[Mapping[str, float]]] = {}
    for stage in stages:
        if stage.name not in seconds:
            continue
        folders[stage.name] = folder / stage.name
        numbers = main_numbers(read_series(read_lines(folder / stage.name / METRICS)))
        texts: list[str] = []
        for number in numbers[:MAX_NUMBERS]:
            # Show an unchanged number only once.
            ends = dict.fromkeys([compact(number.first), compact(number.last)])
            texts.append(f"{short_label(number.name)} {' → '.join(ends)}")
        command = stage.command or "run"
        table.append([stage.name, command, f"{seconds[stage.name]:.0f}", "; ".join(texts)])
        if stage.group:
            last = {short_label(number.name): number.last for number in numbers}
            groups.setdefault(stage.group, []).append(last)
    tables = [table, *seed_tables(groups)]
    return write_report(folder / REPORT, folders, title=title, tables=tables)


def seed_tables(groups: Mapping[str, Sequence[Mapping[str, float]]]) -> list[list[list[str]]]:
    """Return a table of means ± half the width of their 95 % confidence intervals, a row per group.

    `groups` maps each group to the metrics of its stages. Returns an empty list if there are no
    metrics.
    """
    names: dict[str, None] = {}
    for runs in groups.values():
        for run in runs:
            names.update(dict.fromkeys(run))
    if not names:
        return []
    table = [["group", "seeds", *(f"{name}, mean ± 95 %" for name in names)]]
    for group, runs in groups.items():
        row = [group, str(len(runs))]
        for name in names:
            row.append(interval([run[name] for run in runs if name in run]))
        table.append(row)
    return [table]


def interval(numbers: Sequence[float]) -> str:
    """Return the mean ± half the width of its 95 % confidence interval (Student's t) as text.

    A single number is returned without an interval. Returns "" if `numbers` is empty.
    """
    if not numbers:
        return ""
    mean = compact(fmean(numbers))
    if len(numbers) == 1:
        return mean
    freedom = min(len(numbers) - 1, len(STUDENT_T))
    half = STUDENT_T[freedom - 1] * stdev(numbers) / sqrt(len(numbers))
    return f"{mean} ± {compact(half)}"
