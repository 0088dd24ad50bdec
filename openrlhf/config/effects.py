"""Flags that have no effect because of other flags, and the notice that lists them.

A flag that depends on one other flag in its section declares it as `needs` or `unless`. The method
`unused` of each section and each command yields the other flags. Flags that never have an effect
are declared as `obsolete`.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from openrlhf.config.flags import FOR_OLDER_SCRIPTS, Section, flags_of, value_at


def unused_flags(config: Section) -> dict[str, str]:
    """Map the path of each flag that has no effect to the reason.

    A command's reason takes precedence over a section's, which takes precedence over a flag's.
    """
    flags = flags_of(type(config))
    reasons: dict[str, str] = {}
    for prefix, section in _sections(config, ""):
        for unused in section.unused():
            names = _dotted(prefix, unused.names)
            kept = _dotted(prefix, unused.but)
            why = unused.why.replace("--", f"--{prefix}")  # flag names in `why` are relative, too
            for path in flags:
                if f"{path}.".startswith(names) and not f"{path}.".startswith(kept):
                    reasons.setdefault(path, why)
    for path, flag in flags.items():
        section = path.removesuffix(path.rpartition(".")[2])
        if flag.obsolete:
            reasons.setdefault(path, FOR_OLDER_SCRIPTS)
        if flag.needs and not value_at(config, section + flag.needs):
            reasons.setdefault(path, f"without --{section}{flag.needs}")
        if flag.unless and value_at(config, section + flag.unless):
            reasons.setdefault(path, f"with --{section}{flag.unless}")
    return reasons


def _sections(node: Section, prefix: str) -> Iterator[tuple[str, Section]]:
    yield prefix, node
    for name, value in vars(node).items():
        if isinstance(value, Section):
            yield from _sections(value, f"{prefix}{name}.")


def _dotted(prefix: str, names: Sequence[str]) -> tuple[str, ...]:
    """Convert relative names to prefixes that match all paths at or below them."""
    return tuple(f"{prefix}{name}." for name in names)


def without_effect(config: Any) -> Iterator[str]:
    """Yield one sentence for each reason why flags that the user set have no effect."""
    reasons = unused_flags(config)
    flags = flags_of(config.__class__)
    names: dict[str, list[str]] = {}
    for path, value in config.given.items():
        if path in reasons and value != flags[path].default:
            names.setdefault(reasons[path], []).append(f"--{path}")
    for why, found in names.items():
        yield f"{', '.join(sorted(found))}: no effect {why}."
