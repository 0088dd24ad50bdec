"""Flags that have no effect because of other flags, and the notice that lists them.

Each section and each command yields them from its method `unused`.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

from openrlhf.config.flags import Section, flags_of

MOST_NAMES = 8  # flags listed in one notice


def unused_flags(config: Section) -> dict[str, str]:
    """Map the path of each flag that has no effect to the reason.

    A command's reason takes precedence over a section's.
    """
    flags_below = _flags_below(type(config))
    reasons: dict[str, str] = {}
    for prefix, section in _sections(config, ""):
        for unused in section.unused():
            # flags in `why` are relative to the section, too
            why = unused.why.replace("--", f"--{prefix}")
            affected = _flags_at(unused.names, prefix, flags_below)
            kept = _flags_at(unused.but, prefix, flags_below)
            for path in affected:
                if path not in kept:
                    reasons.setdefault(path, why)
    return reasons


def _flags_at(
    names: Sequence[str], prefix: str, flags_below: Mapping[str, Sequence[str]]
) -> list[str]:
    """Return the paths of all flags at or below these names, which are relative to a section."""
    paths: list[str] = []
    for name in names:
        paths += flags_below[f"{prefix}{name}"]
    return paths


@cache
def _flags_below(root: type[Section]) -> dict[str, list[str]]:
    """Map the path of every flag and section to the paths of the flags at or below it."""
    found: dict[str, list[str]] = {}
    for path in flags_of(root):
        for name in accumulate(path.split("."), "{}.{}".format):
            found.setdefault(name, []).append(path)
    return found


def _sections(node: Section, prefix: str) -> Iterator[tuple[str, Section]]:
    yield prefix, node
    for name, value in vars(node).items():
        if isinstance(value, Section):
            yield from _sections(value, f"{prefix}{name}.")


def without_effect(config: Section, given: Mapping[str, Any]) -> Iterator[str]:
    """Yield one sentence for each reason why flags that the user set have no effect."""
    reasons, flags = unused_flags(config), flags_of(type(config))
    names: dict[str, list[str]] = {}
    for path, value in given.items():
        if path in reasons and value != flags[path].default:
            names.setdefault(reasons[path], []).append(f"--{path}")
    for why, found in names.items():
        shown = sorted(found)[:MOST_NAMES]
        if len(found) > MOST_NAMES:
            shown.append(f"{len(found) - MOST_NAMES} more")
        yield f"{', '.join(shown)}: no effect {why}."
