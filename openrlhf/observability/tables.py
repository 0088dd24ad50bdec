"""Tables on the terminal: an evaluation by data source, and what a reward gave to the rows of a dataset."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from rich.console import Console
from rich.table import Table
from rich.text import Text

from openrlhf.observability.lines import compact

EXAMPLES, ERRORS, TEXT = 5, 3, 60  # rows shown of each kind, and characters of their texts


def print_sources(rows: Mapping[str, Mapping[str, float]], *, console: Console) -> None:
    """Print one row per data source. All rows have the same columns; integers are counts."""
    columns = list(next(iter(rows.values())))
    table = Table("data source", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right")
    for source, numbers in rows.items():
        table.add_row(Text(source), *(_shown(numbers[column]) for column in columns))
    console.print("", table)


def _shown(number: float) -> str:
    if isinstance(number, int):
        return f"{number:,}"
    return compact(number) if math.isfinite(number) else "-"


@dataclass(frozen=True, kw_only=True)
class ScoredRow:
    """One row and the result of its call. `seconds`: duration of the call, which the rows of one group share."""

    response: str
    label: str
    reward: float | None
    seconds: float
    failure: str | None = None
    error: str | None = None


def print_scores(rows: Sequence[ScoredRow], *, seconds: float, at_once: int) -> None:
    """Print rewards, errors by kind, times, some scored rows and the first errors. `seconds`: the time that all calls took."""
    console = Console(highlight=False)
    for name, value in _facts(rows, seconds, at_once):
        console.print(Text(f" {name:<14}  {value}"))
    examples = Table("reward", "label", "response", title="Scored", title_justify="left")
    for row in _spread([row for row in rows if row.reward is not None]):
        examples.add_row(f"{row.reward:g}", Text(_end(row.label)), Text(_end(row.response)))
    if examples.rows:
        console.print("", examples)
    for row in [row for row in rows if row.error is not None][:ERRORS]:
        console.print(f"\n{row.failure}, with the response", Text(repr(_end(row.response))))
        console.print(Text((row.error or "").strip()), soft_wrap=True)


def _facts(rows: Sequence[ScoredRow], seconds: float, at_once: int) -> Iterable[tuple[str, str]]:
    rewards = [row.reward for row in rows if row.reward is not None]
    failures = Counter(row.failure for row in rows if row.error is not None)
    times = sorted(row.seconds for row in rows)
    yield "rows", f"{len(rows):,} in {seconds:.1f} s, {at_once} at a time"
    if rewards:
        ends = f"from {min(rewards):.4g} to {max(rewards):.4g}"
        yield "reward", f"mean {fmean(rewards):.4g}, deviation {pstdev(rewards):.4g}, {ends}"
    yield "errors", f"{failures.total():,} ({failures.total() / len(rows):.1%})"
    for kind, count in failures.most_common():
        yield f"  {kind}", f"{count:,}"
    middle, late = times[len(times) // 2], times[int(0.99 * (len(times) - 1))]
    yield "time of a call", f"median {middle:.3g} s, 99 % within {late:.3g} s, longest {times[-1]:.3g} s"


def _spread(rows: Sequence[ScoredRow]) -> list[ScoredRow]:
    """Rows from the lowest reward to the highest, evenly spread in between."""
    ordered = sorted(rows, key=lambda row: row.reward or 0.0)
    places = {round(i * (len(ordered) - 1) / (EXAMPLES - 1)) for i in range(EXAMPLES)}
    return [ordered[place] for place in sorted(places)] if ordered else []


def _end(text: str) -> str:
    """The end of a text, where its answer is, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= TEXT else f"…{line[-TEXT:]}"
