"""Declarations of all metrics: name, reduction, unit, range and a one-line definition.

The declarations are in `glossary.toml`; docs/metrics.md is generated from them. Each table of the
file lists metrics with the same reduction over micro-batches and ranks (see metrics.py), unit and
range. {datasource}, {k}, {i} and {kind} in a name match any text. If several names match, the first
one applies. Numbers returned by a user's reward function or agent are logged as means, under
`train/<name>`, and need no declaration.
"""

import re
from functools import cache
from typing import NamedTuple

from openrlhf.config.flags import toml_beside


class MetricSpec(NamedTuple):
    """Declaration of a metric.

    `unit` is "" for a plain number. All values of the metric lie within `bounds`.
    """

    reduces: str  # "mean", "max", "last" or "deviation"
    unit: str
    bounds: tuple[float, float]
    definition: str


@cache
def find_spec(name: str) -> MetricSpec | None:
    """Return the declaration of a logged metric, or None if user code added it.

    Example: `eval/eval_gsm8k_pass4` matches `eval/eval_{datasource}_pass{k}`.
    """
    for declared, spec in GLOSSARY.items():
        pattern = re.sub(r"\\{\w+\\}", ".+", re.escape(declared))
        if re.fullmatch(pattern, name):
            return spec
    return None


def _read_specs() -> dict[str, MetricSpec]:
    specs: dict[str, MetricSpec] = {}
    for traits, metrics in toml_beside(__file__).items():
        reduces, unit, low, high = traits.split(" | ")
        for name, definition in metrics.items():
            specs[name] = MetricSpec(reduces, unit, (float(low), float(high)), definition)
    return specs


GLOSSARY = _read_specs()
