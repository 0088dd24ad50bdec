"""One page about all stages of a pipeline: a line for each, a table over seeds, then what each
run's own page has.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

from openrlhf.observability.lines import compact
from openrlhf.observability.report import main_numbers, read_series, short_label, write_report
from openrlhf.observability.run_folder import METRICS, read_lines

SHOWN = 3  # main numbers in the line of a stage
# The 97.5 % point of Student's t by degrees of freedom from 1 on; more than 9 count as 9, which
# makes intervals a little wide.
T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass(frozen=True)
class Result:
    """A stage that has run. Stages of one `group` differ in their seed."""

    name: str
    folder: Path
    command: str
    group: str
    seconds: float


def write_pipeline_report(path: Path, results: Sequence[Result], *, title: str) -> Path:
    """Write the page. Returns its path."""
    numbers = {
        result: main_numbers(read_series(read_lines(result.folder / METRICS))) for result in results
    }
    lines: list[list[str]] = [["stage", "command", "seconds", "main numbers, first → last"]]
    for result, found in numbers.items():
        said = [
            f"{short_label(name)} {' → '.join(dict.fromkeys(map(compact, ends)))}"
            for name, *ends in found[:SHOWN]
        ]
        lines.append(
            [result.name, result.command or "run", f"{result.seconds:.0f}", "; ".join(said)]
        )
    groups: dict[str, list[Mapping[str, float]]] = {}
    for result, found in numbers.items():
        if result.group:
            groups.setdefault(result.group, []).append(
                {short_label(name): last for name, _, last in found}
            )
    folders = {result.name: result.folder for result in results}
    return write_report(path, folders, title=title, tables=[lines, *over_seeds(groups)])


def over_seeds(groups: Mapping[str, Sequence[Mapping[str, float]]]) -> list[list[list[str]]]:
    """The table with a row for each group, of what its stages came to: mean ± half of the 95 %
    interval. No table without groups.
    """
    names = list(dict.fromkeys(name for runs in groups.values() for run in runs for name in run))
    heads = ["group", "seeds", *(f"{name}, mean ± 95 %" for name in names)]
    table = [heads]
    for group, runs in groups.items():
        cells = (interval([run[name] for run in runs if name in run]) for name in names)
        table.append([group, str(len(runs)), *cells])
    return [table] if names else []


def interval(numbers: Sequence[float]) -> str:
    """Mean ± half of the 95 % interval by Student's t; of one number, the number."""
    if len(numbers) < 2:
        return "".join(map(compact, numbers))
    half = T[min(len(numbers) - 1, len(T)) - 1] * stdev(numbers) / sqrt(len(numbers))
    return f"{compact(fmean(numbers))} ± {compact(half)}"
