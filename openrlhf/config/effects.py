"""Whether a flag has an effect, from one declaration of what it belongs to.

A declaration is a condition on the resolved configuration. `train.enable_ema`: that flag is set.
`!rollout.only`: it is not. `optim=adam,muon`: it has one of these values.
`vllm.max_engines<vllm.num_engines`: it is less than a number, or than the flag of that whole name.
`given.ds.zero_stage`: the value that the user gave. `a|b`: either holds. Names are looked up in the
flag's own section first, then in the sections around it. A name that the command does not have asks
for nothing.

Conditions also say which flags do not go together, or need a word of explanation:
`combinations.toml`.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from openrlhf.config.flags import Flag, flags_of, toml_beside, value_at

Given = Mapping[str, Any]  # the values that the user gave, by path
Sentences = list[
    tuple[object, str]
]  # whether a sentence holds; <train.seed> in it becomes --train.seed 42
MOST_NAMES = 8  # in one notice
GIVEN = "given."  # before the name of a flag: what the user gave
# Conditions, and the flags and sections that have them; `-train.seed` takes one out.
Effects = Mapping[str, Sequence[str]]
EFFECTS = toml_beside(__file__)  # of several commands
WORDS = EFFECTS["words"]  # what a term is called that is not about a flag
COMBINATIONS: dict[str, dict[str, dict[str, str]]] = toml_beside(__file__, "combinations.toml")


def without_effect(config: Any, given: Given) -> Sentences:
    """One sentence for each condition that is not met, with the flags that were set and need it."""
    idle: dict[str, list[str]] = {}
    flags = flags_of(config.__class__)
    for path, value in given.items():
        if value != flags[path].default and (ending := unmet(config, flags[path])):
            idle.setdefault(ending, []).append(f"--{path}")
    return [(names, f"{_listed(names)}: no effect {ending}.") for ending, names in idle.items()]


def combined(config: Any, kind: str, table: str) -> Sentences:
    """The rows of a table of combinations, `refused` or `noticed`, whose names are looked up from
    the root.
    """
    rows = COMBINATIONS[kind][table].items()
    return [
        (all(_met(config, each) for each in conditions.split(" & ")), sentence)
        for conditions, sentence in rows
    ]


def _met(config: Any, condition: str) -> bool:
    return any(_holds(term, value) for term, (_, value) in terms_of(config, "root", condition))


def terms_of(config: Any, path: str, condition: str) -> list[tuple[str, tuple[str, Any]]]:
    """The terms of a condition about what the command has, each with path and value, seen from a
    flag.
    """
    return [
        (term, found) for term in condition.split("|") if (found := look_up(config, path, term))
    ]


def unmet(config: Any, flag: Flag) -> str | None:
    """How the first condition of a flag that is not met is put; None if the flag has an effect."""
    for condition in conditions_of(config.__class__, flag):
        terms = terms_of(config, flag.path, condition)
        if terms and not any(_holds(term, value) for term, (_, value) in terms):
            flags = flags_of(config.__class__)
            names = (
                _spelled(path, term) for term, (path, _) in terms if path in flags or path in WORDS
            )
            return f"{'with' if condition.startswith('!') else 'without'} {' or '.join(names)}"
    return None


def _spelled(path: str, term: str) -> str:
    values = term.partition("=")[2].replace(",", " or ")
    return WORDS.get(path) or f"--{path} {values}".rstrip()


def conditions_of(root: type[Any], flag: Flag) -> list[str]:
    """Every condition that a flag of a command has."""
    return [
        *(text for text, paths in root.effects.items() if _names(paths, flag.path)),
        *flag.needs,
    ]


def look_up(config: Any, path: str, term: str) -> tuple[str, Any] | None:
    """Path and value of what a term is about, seen from a flag; None where the command has nothing
    of that name.
    """
    name, less, bound = term.removeprefix("!").partition("=")[0].partition("<")
    if name.startswith(GIVEN):
        return name, config.given.get(name.removeprefix(GIVEN))
    while path:
        path = path.rpartition(".")[0]
        full = f"{path}.{name}" if path else name
        with suppress(AttributeError):
            value = value_at(config, full)
            if not less:
                return full, value
            limit = int(bound) if bound.isdigit() else value_at(config, bound)
            return full, (value or 0) < (limit or 0)
    return None


def _holds(term: str, value: Any) -> bool:
    _, equals, values = term.partition("=")
    met = str(value) in values.split(",") if equals else bool(value)
    return met != term.startswith("!")


def _names(paths: Sequence[str], flag: str) -> bool:
    """Whether a list of flags and sections has a flag in it."""
    signs = [
        not word.startswith("-")
        for word in paths
        if f"{flag}.".startswith(word.removeprefix("-") + ".")
    ]
    return bool(signs) and all(signs)


def _listed(names: list[str]) -> str:
    shown = sorted(names)
    more = [f"{len(shown) - MOST_NAMES} more"] if len(shown) > MOST_NAMES else []
    return ", ".join([*shown[:MOST_NAMES], *more])
