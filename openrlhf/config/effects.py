"""Flags that have no effect because of other flags, and the notice that lists them.

A flag declares the settings that it depends on. The method `unused` of a section or command yields
the flags that depend on anything else.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from openrlhf.config.flags import FOR_OLDER_SCRIPTS, Flag, Section, flags_of, value_at


def unused_flags(config: Section) -> dict[str, str]:
    """Map the path of each flag that has no effect to the reason.

    A command's reason takes precedence over a section's reason, and both take precedence over the
    flag's own reason.
    """
    flags = flags_of(type(config))
    reasons: dict[str, str] = {}
    for prefix, section in _sections(config, ""):
        for unused in section.unused():
            names, kept = _dotted(prefix, unused.names), _dotted(prefix, unused.but)
            why = unused.why.replace("--", f"--{prefix}")  # flags in `why` are also relative
            for path in flags:
                if f"{path}.".startswith(names) and not f"{path}.".startswith(kept):
                    reasons.setdefault(path, why)
    for path, flag in flags.items():
        why = _declared_reason(config, flag)
        if why:
            reasons.setdefault(path, why)
    return reasons


def _sections(node: Section, prefix: str) -> Iterator[tuple[str, Section]]:
    yield prefix, node
    for name, value in vars(node).items():
        if isinstance(value, Section):
            yield from _sections(value, f"{prefix}{name}.")


def _dotted(prefix: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return the prefixes of all paths at or below these names, which are relative."""
    return tuple(f"{prefix}{name}." for name in names)


def _declared_reason(config: Section, flag: Flag) -> str:
    """Return why a flag has no effect according to its own declaration, or an empty string."""
    if flag.obsolete:
        return FOR_OLDER_SCRIPTS
    needs = _settings(config, flag, flag.needs)
    if needs and not any(_holds(config, setting) for setting in needs):
        return f"without {' or '.join(needs)}"
    for setting in _settings(config, flag, flag.unless):
        if _holds(config, setting):
            return f"with {setting}"
    return ""


def _settings(config: Section, flag: Flag, declared: str) -> list[str]:
    """Return the settings in `needs` or `unless` as typed, without flags of other commands."""
    if declared.startswith("--"):
        known = flags_of(type(config))
        return [name for name in declared.split(" or ") if name.removeprefix("--") in known]
    if not declared:
        return []
    section = flag.path.removesuffix(flag.path.rpartition(".")[2])
    return [f"--{section}{declared}"]


def _holds(config: Section, setting: str) -> bool:
    """Return whether a setting holds, such as --ds.zero_stage 2 or 3, or a flag that is true."""
    path, _, values = setting.removeprefix("--").partition(" ")
    value = value_at(config, path)
    if values:
        return str(value) in values.split(" or ")
    return bool(value)


def without_effect(config: Section, given: Mapping[str, Any]) -> Iterator[str]:
    """Yield one sentence for each reason why flags that the user set have no effect."""
    reasons, flags = unused_flags(config), flags_of(type(config))
    names: dict[str, list[str]] = {}
    for path, value in given.items():
        if path in reasons and value != flags[path].default:
            names.setdefault(reasons[path], []).append(f"--{path}")
    for why, found in names.items():
        yield f"{', '.join(sorted(found))}: no effect {why}."
