"""What every logged number means: its name, how it reduces, its unit, its range and one line of
definition.

The declarations are in `glossary.toml`, and docs/metrics.md shows them as tables. Numbers that a
user's reward function or agent adds are logged as `train/<name>`, as means, and need no
declaration.
"""

import re
from functools import cache
from typing import Any, NamedTuple

from openrlhf.config.flags import toml_beside


class MetricSpec(NamedTuple):
    """The declaration of one metric. `unit` is "" for a plain number; every value lies within
    `bounds`.
    """

    reduces: str  # "mean", "max", "last" or "deviation"
    unit: str
    bounds: tuple[float, float]
    definition: str


@cache
def find_spec(name: str) -> MetricSpec | None:
    """The declaration of a logged name, or None for a number that user code added.

    Example: `eval/eval_gsm8k_pass4` finds `eval/eval_{datasource}_pass{k}`.
    """
    for declared, spec in GLOSSARY.items():
        pattern = re.sub(r"\\{\w+\\}", ".+", re.escape(declared))
        if re.fullmatch(pattern, name):
            return spec
    return None


GROUPS: list[dict[str, Any]] = toml_beside(__file__)["group"]
GLOSSARY = {
    name: MetricSpec(group["reduces"], group["unit"], tuple(group["range"]), definition)
    for group in GROUPS
    for name, definition in group["metrics"].items()
}
