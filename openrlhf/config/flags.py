"""Fields of dataclass trees as flags: how they are declared, found, converted and bounded.

A field's path from the root is its flag: `config.ds.lora.rank` is `--ds.lora.rank`. Name, type,
default and help are written once; parser, help, files and error messages come from there.
"""

import difflib
import json
import operator
import os.path
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, dataclass_transform

from openrlhf.masking import HIDDEN, hide, without_secrets
from openrlhf.reporting import notice as notice

T = TypeVar("T")
Shape = Literal["switch", "one", "pair", "list", "json"]
TYPES: dict[str, tuple[Shape, type]] = {  # annotations a flag may have, `| None` left out
    "bool": ("switch", bool), "int": ("one", int), "float": ("one", float), "str": ("one", str),
    "tuple[float, float]": ("pair", float), "tuple[int, ...]": ("list", int),
    "tuple[float, ...]": ("list", float), "tuple[str, ...]": ("list", str),
    "Mapping[str, Any]": ("json", dict),
}  # fmt: skip
KINDS = {int: "a whole number", float: "a number", str: "a text"}
BOUNDS: dict[str, tuple[str, Callable[[float, float], bool]]] = {
    "ge": ("at least", operator.ge), "gt": ("above", operator.gt),
    "le": ("at most", operator.le), "lt": ("below", operator.lt),
}  # fmt: skip


class UserError(Exception):
    """A user's mistake, or a problem that the user can fix. Commands print only the message.

    Secrets in URLs are hidden: the message may end up in logs.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*map(hide, args))


class ConfigError(UserError, ValueError):
    """Mistakes of the user in the flags. The message has a line for each of the `violations`."""

    def __init__(self, violations: str | Sequence[str]) -> None:
        if isinstance(violations, str):
            violations = [violations]
        self.violations = [without_secrets(text) for text in violations]
        head = [f"{len(self.violations)} mistakes:"] if len(self.violations) > 1 else []
        super().__init__("\n  - ".join([*head, *self.violations]))


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One flag of a command, as the parser, files, messages and the surface tests see it."""

    path: str
    shape: Shape
    kind: type  # of a value; of each value of a pair or a list
    optional: bool  # None is a value
    default: Any
    section: str  # the title of its section
    help: str
    choices: Collection[str] | None = None  # may grow: plug-ins extend the tables in `choices`
    metavar: str | None = None
    ge: float | None = None  # bounds hold for each number of a pair
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    holds: Literal["model", "dataset", "place"] | None = (
        None  # paths or hub names, by comma; a path of this machine
    )
    writes: str = ""  # the kind of output that the command writes to this place: `places`
    required: bool = False  # None until it is given; `check()` asks for it
    saved: bool = True  # False: left out of configuration files
    secret: bool = False  # never shown

    @property
    def name(self) -> str:
        """The flag as it is typed."""
        return f"--{self.path}"

    @property
    def switches(self) -> dict[str, bool]:
        """The spellings and what they set; a switch that is on by default has an opposite."""
        head, dot, leaf = self.path.rpartition(".")
        paired = self.shape == "switch" and self.default
        return {self.name: True} | ({f"--{head}{dot}no_{leaf}": False} if paired else {})

    def typed(self, value: Any) -> str:
        """The words of a command line that give it this value; a switch is only its name."""
        if self.secret and value is not None:
            value = HIDDEN
        shown = hide(value)
        values = shown if self.shape in ("pair", "list") else [shown]
        words = [f"{v:g}" if isinstance(v, float) else str(v) for v in values or ()]
        return " ".join([self.name, *(words if self.shape != "switch" else [])])


@dataclass(frozen=True)
class Unused:
    """Flags and sections that have no effect, and why.

    In a section, the names of flags are relative to it, in `why` too: "without --rank".
    """

    names: Sequence[str]
    why: str
    but: Sequence[str] = ()  # parts of these sections that do have an effect


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Section:
    """A base that makes frozen, keyword-only dataclasses of flags and of sections below.

    The docstring heads the section in the help, and is inherited.
    """

    def __init_subclass__(cls) -> None:
        cls.__doc__ = cls.__doc__ or cls.__mro__[1].__doc__
        dataclass(frozen=True, kw_only=True)(cls)

    def unused(self) -> Iterator[Unused]:
        """Yield the flags without an effect under these values."""
        yield from ()


def option(default: T, help: str, **info: Any) -> T:
    """A field that is a flag. `info`: fields of `Flag` that have a default."""
    return field(default_factory=lambda: copy(default), metadata={"help": help, **info})


def derived(help: str, **info: Any) -> Any:
    """A flag that is None where it is not given, until `resolve()` fills it in."""
    return option(None, help, **info)


def required(help: str, **info: Any) -> Any:
    """A flag the command cannot run without."""
    return option(None, help, required=True, **info)


@cache
def flags_of(root: type[Any]) -> Mapping[str, Flag]:
    """Every flag of a configuration class by its path, in order of declaration."""
    return {flag.path: flag for flag in _walk(root(), "")}


def _walk(node: Any, prefix: str) -> Iterator[Flag]:
    for each in fields(node):
        path, default = prefix + each.name, getattr(node, each.name)
        if is_dataclass(default):
            yield from _walk(default, f"{path}.")
        elif "help" in each.metadata:  # else the tree's own, such as what was given
            annotation = str(each.type)
            shape, kind = TYPES[annotation.removesuffix(" | None")]
            optional = default is None or annotation.endswith(" | None")
            about = {"section": node.__doc__, **each.metadata}
            yield Flag(
                path=path, shape=shape, kind=kind, optional=optional, default=default, **about
            )


def flags_in(config: Any) -> list[tuple[Flag, Any]]:
    """The flags of a tree with their values."""
    return [(flag, value_at(config, path)) for path, flag in flags_of(config.__class__).items()]


def value_at(config: Any, path: str) -> Any:
    """The value or section at a dotted path. AttributeError where there is none."""
    return operator.attrgetter(path)(config)


def amend(config: T, values: Mapping[str, Any]) -> T:
    """A copy of the tree with the values at these dotted paths."""
    changed: dict[str, Any] = {}
    for path, value in values.items():
        name, _, rest = path.partition(".")
        changed[name] = (
            amend(changed.get(name, getattr(config, name)), {rest: value}) if rest else value
        )
    return replace(cast(Any, config), **changed)


def items(text: str | None) -> list[str]:
    """The parts of a comma list, without blanks."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def spelled_out(config: Any, sentences: Iterable[str]) -> list[str]:
    """Return sentences with each <flag> as it is typed: <train.seed> becomes --train.seed 42."""
    typed = {flag.path: flag.typed(value) for flag, value in flags_in(config)}
    return [re.sub(r"<([\w.]+)>", lambda m: typed.get(m[1], m[0]), text) for text in sentences]


def mentions(text: str, paths: Iterable[str]) -> bool:
    """Whether a sentence names one of these flags."""
    return any(re.search(rf"--{re.escape(path)}(?![\w.]*\w)", text) for path in paths)


def convert(flag: Flag, raw: Any) -> Any:
    """The value of a flag from what the command line (texts) or a file (YAML values) has for it.

    A leading ~ of a path is the home folder. Raises ConfigError with a sentence that names the
    flag.
    """
    if raw is None and flag.optional:
        return None
    if flag.shape == "switch":
        if isinstance(raw, bool):
            return raw
        raise ConfigError(f"{flag.name} is a switch: true or false, not {raw!r}.")
    if flag.shape == "json":
        return _json_object(flag, raw)
    if flag.shape == "one":
        return _scalar(flag, raw)
    items = cast("list[Any]", raw) if isinstance(raw, list) else [raw]
    if flag.shape == "pair" and len(items) != 2:
        raise ConfigError(f"{flag.name} takes two numbers, not {len(items)}: {items!r}.")
    return tuple(_scalar(flag, item) for item in items)


def _scalar(flag: Flag, raw: Any) -> Any:
    truths = (
        {True: "on", False: "off"} if "on" in (flag.choices or ()) else {}
    )  # as YAML reads on and off
    value = truths.get(raw) if isinstance(raw, bool) else raw
    try:
        value = flag.kind(value) if isinstance(value, (str, int, float)) else None
    except (ValueError, OverflowError):
        value = None
    if value is None or (flag.kind is int and isinstance(raw, float) and raw != value):
        raise ConfigError(f"{flag.name} takes {KINDS[flag.kind]}, not {raw!r}.")
    if flag.choices is not None and value not in flag.choices:
        meant = {"grpo": ["group_norm"]}.get(value) or nearest(value, flag.choices)
        known, hint = ", ".join(flag.choices), did_you_mean(meant)
        if isinstance(flag.choices, dict):  # a table that plug-ins extend
            hint += " To use a name of your own, register it with --plugin FILE.py."
        raise ConfigError(f"{flag.name} takes one of {known}, not {value!r}.{hint}")
    if flag.holds:
        paths = [value] if flag.holds == "place" else re.split(r"(,\s*)", value)
        return "".join(map(os.path.expanduser, paths))
    return value


def _json_object(flag: Flag, raw: Any) -> dict[str, Any]:
    try:
        value = json.loads(raw) if isinstance(raw, str) else raw
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{flag.name} takes a JSON object, and {raw!r} is none: {error}."
        ) from None
    if not isinstance(value, dict):
        raise ConfigError(f'{flag.name} takes a JSON object, such as {{"name": 1}}, not {raw!r}.')
    return cast("dict[str, Any]", value)


def text_of(flag: str, file: str) -> str:
    """The text of a file that a flag names. Raises ConfigError if it cannot be read, or is not
    UTF-8.
    """
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{flag} {file} cannot be read as a text file in UTF-8: {error}"
        ) from error


def toml_beside(module: str, name: str = "") -> dict[str, Any]:
    """The TOML file beside a module, which gives its `__file__`: the one of the same name, or of
    this name.
    """
    return tomllib.loads(
        Path(module).with_name(name or f"{Path(module).stem}.toml").read_text(encoding="utf-8")
    )


def tables(module: str) -> dict[str, dict[str, str]]:
    """By name, what the TOML file beside a module says of names: `said = ["name", "name"]` in one
    of its tables.
    """
    read = toml_beside(module).items()
    return {
        title: {name: said for said, names in table.items() for name in names}
        for title, table in read
    }


def nearest(name: str, known: Collection[str]) -> list[str]:
    """Return at most two known names that a user may have meant.

    Similar names of the same section are returned alone. Else names with this last part come first,
    then similar names.
    """
    section, _, leaf = name.rpartition(".")
    neighbors = [path for path in known if section and path.rpartition(".")[0] == section]
    misspelled = difflib.get_close_matches(name, neighbors, n=2, cutoff=0.9)
    if misspelled:
        return misspelled
    leaves = {path: path.rpartition(".")[2] for path in known}
    same = [path for path in known if leaves[path] == leaf]
    begun = [path for path in known if len(leaf) > 3 and leaves[path].startswith(leaf)]
    ended = [path for path in known if leaf.endswith(f"_{leaves[path]}")]
    by_leaf = difflib.get_close_matches(name, same or begun, n=2, cutoff=0.0)
    similar = difflib.get_close_matches(name, known, n=2, cutoff=0.7)
    close = difflib.get_close_matches(leaf, leaves.values(), n=2, cutoff=0.8)
    found = [*by_leaf, *(path for path in known if leaves[path] in close), *ended, *similar]
    return list(dict.fromkeys(found))[:2]


def did_you_mean(names: Collection[str]) -> str:
    """The end of a sentence about a name that is unknown."""
    return f" Did you mean {' or '.join(names)}?" if names else ""


def bound_violations(config: Any) -> Iterator[str]:
    """Required flags that are not set, and numbers outside the bounds of their flag, or NaN."""
    for flag, resolved in flags_in(config):
        value = (
            config.given.get(flag.path) if flag.default is None else resolved
        )  # a derived value is not the user's
        if value in (None, "") and flag.required:
            yield f"{flag.name} must be given. {flag.help}"
        limits = {name: limit for name in BOUNDS if (limit := getattr(flag, name)) is not None}
        for number in cast("tuple[Any, ...]", value if isinstance(value, tuple) else (value,)):
            inside = (BOUNDS[name][1](number, limit) for name, limit in limits.items())
            if isinstance(number, (int, float)) and not (number == number and all(inside)):
                words = " and ".join(f"{BOUNDS[name][0]} {limits[name]:g}" for name in limits)
                yield f"{flag.name} is {number}, but it must be {words or 'a number'}."
                break
