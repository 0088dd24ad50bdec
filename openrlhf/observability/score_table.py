"""What a reward gave to the rows of a dataset, as tables on the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from rich.console import Console
from rich.table import Table
from rich.text import Text

EXAMPLES, ERRORS, TEXT = 5, 3, 60  # rows shown of each kind, and characters of their texts


@dataclass(frozen=True, kw_only=True)
class ScoredRow:
    """One row and what its call gave. `seconds`: of the call, which rows of one group share."""

    response: str
    label: str
    reward: float | None
    seconds: float
    failure: str | None = None
    error: str | None = None


def print_scores(rows: Sequence[ScoredRow], *, seconds: float, at_once: int, console: Console | None = None) -> None:
    """Print rewards, errors by kind, times, some scored rows and the first errors; `seconds` is what all of it took."""
    console = console or Console(highlight=False)
    facts = Table(show_header=False, box=None)
    for name, value in _facts(rows, seconds, at_once):
        facts.add_row(name, Text(value))
    console.print(facts)
    examples = Table("reward", "label", "response", title="Scored", title_justify="left")
    for row in _spread([row for row in rows if row.reward is not None]):
        examples.add_row(f"{row.reward:g}", Text(_start(row.label)), Text(_end(row.response)))
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
        yield (
            "reward",
            f"mean {fmean(rewards):.4g}, deviation {pstdev(rewards):.4g}, from {min(rewards):.4g} to {max(rewards):.4g}",
        )
    yield "errors", f"{failures.total():,} ({failures.total() / len(rows):.1%})"
    for kind, count in failures.most_common():
        yield f"  {kind}", f"{count:,}"
    middle, late = times[len(times) // 2], times[int(0.99 * (len(times) - 1))]
    yield "time of a call", f"median {middle:.3g} s, 99 % within {late:.3g} s, longest {times[-1]:.3g} s"


def _spread(rows: Sequence[ScoredRow]) -> list[ScoredRow]:
    """Rows from the lowest reward to the highest, as many different rewards as there is room for."""
    ordered = sorted(rows, key=lambda row: row.reward or 0.0)
    last = max(1, EXAMPLES - 1)
    places = sorted({round(i * (len(ordered) - 1) / last) for i in range(EXAMPLES)})
    return [ordered[place] for place in places] if ordered else []


def _start(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= TEXT else f"{line[:TEXT]}…"


def _end(text: str) -> str:
    """Where the answer is."""
    line = " ".join(text.split())
    return line if len(line) <= TEXT else f"…{line[-TEXT:]}"
