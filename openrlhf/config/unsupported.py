"""Flags whose features are not available yet (`not_yet`). Unavailable flags are refused by name."""

from collections.abc import Iterator
from typing import Any

from openrlhf.config.effects import unused_flags
from openrlhf.config.flags import flags_in, flags_of, mentions


def refused_flags(root: type[Any]) -> set[str]:
    """Return the flags of a command that are refused with any value except their default.

    The result includes flags that have no effect without a refused flag.
    """
    refused = {path for path, flag in flags_of(root).items() if flag.not_yet}
    conditions = unused_flags(root())
    return refused | {path for path, why in conditions.items() if mentions(why, refused)}


def refusals(config: Any) -> Iterator[tuple[str, str]]:
    """Yield the path of each flag that sets an unavailable feature, with the message about it."""
    for flag, value in flags_in(config):
        if flag.not_yet and value != flag.default:
            yield flag.path, f"{flag.typed(value)} is not available yet: {flag.not_yet}."
