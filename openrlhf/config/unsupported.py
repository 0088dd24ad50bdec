"""Flags whose features are not available yet (`not_yet`). Unavailable flags are refused by name."""

from collections.abc import Iterator
from typing import Any

from openrlhf.config.flags import flags_in


def refusals(config: Any) -> Iterator[tuple[str, str]]:
    """Yield the path of each flag that sets an unavailable feature, with the message about it."""
    for flag, value in flags_in(config):
        if flag.not_yet and value != flag.default:
            yield flag.path, f"{flag.typed(value)} is not available yet: {flag.not_yet}."
