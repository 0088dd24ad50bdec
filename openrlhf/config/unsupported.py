"""Flags whose feature is not available yet, refused by name: those in `unsupported.toml`."""

from collections.abc import Iterator
from typing import Any

from openrlhf.config.effects import unused_flags
from openrlhf.config.flags import flags_in, mentions, tables

NOT_YET = tables(__file__)["instead"]  # what to do instead of a flag, or of the flags of a section


def is_refused(path: str, root: Any) -> bool:
    """Return whether a flag, a section it is in, or the feature it belongs to is refused at any
    value but its default.
    """
    if any(part in NOT_YET for part in _sections(path)):
        return True
    return mentions(unused_flags(root).get(path, ""), NOT_YET)


def _sections(path: str) -> list[str]:
    """`a`, `a.b` and `a.b.c` of `a.b.c`."""
    return [path[:end] for end, sign in enumerate(f"{path}.") if sign == "."]


def refusals(config: Any) -> Iterator[tuple[str, str]]:
    """Path and sentence of each flag of a configuration whose feature is not available yet."""
    for flag, value in flags_in(config):
        for path in _sections(flag.path) if value != flag.default else []:
            if path in NOT_YET:
                yield flag.path, f"{flag.typed(value)} is not available yet: {NOT_YET[path]}."
