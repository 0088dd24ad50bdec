"""Flags as fields of a tree of dataclasses: declaration, lookup, conversion and bounds.

A field's path from the root is its flag: `config.ds.lora.rank` is `--ds.lora.rank`. The name, type,
default and help of a flag are written once. The parser, `--help`, the JSON schema, configuration
files and error messages use this declaration.
"""

import difflib
import json
import operator
import os.path
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, dataclass_transform

from openrlhf.masking import HIDDEN, hide, without_secrets

T = TypeVar("T")
Shape = Literal["switch", "one", "pair", "list", "json"]
TYPE_NAMES = {int: "a whole number", float: "a number", str: "text"}
YAML_WORDS = {True: "on", False: "off"}  # the words that YAML reads as booleans


BOUNDS: dict[str, tuple[str, Callable[[float, float], bool]]] = {
    "ge": ("at least", operator.ge),
    "gt": ("above", operator.gt),
    "le": ("at most", operator.le),
    "lt": ("below", operator.lt),
}
# Maps each annotation to the flag's shape and to the type of its value or list entries.
TYPES: dict[str, tuple[Shape, type]] = {
    "bool": ("switch", bool),
    "int": ("one", int),
    "float": ("one", float),
    "str": ("one", str),
    "tuple[float, float]": ("pair", float),
    "tuple[int, ...]": ("list", int),
    "tuple[float, ...]": ("list", float),
    "tuple[str, ...]": ("list", str),
    "Mapping[str, Any]": ("json", dict),
}


class UserError(Exception):
    """A user's mistake, or another problem that the user can fix. Commands print only the message.

    Secrets in URLs are masked, because the message may end up in logs.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*map(hide, args))


class ConfigError(UserError, ValueError):
    """Mistakes in the user's flags. The message has one line for each entry of `violations`."""

    def __init__(self, violations: str | Sequence[str]) -> None:
        if isinstance(violations, str):
            violations = [violations]
        self.violations = [without_secrets(text) for text in violations]
        lines = self.violations
        if len(lines) > 1:
            lines = [f"{len(lines)} mistakes:", *lines]
        super().__init__("\n  - ".join(lines))


@dataclass(frozen=True, kw_only=True)
class Flag:
    """A flag of a command."""

    path: str
    shape: Shape
    kind: type  # type of the value, or of each value in a pair or list
    optional: bool  # accepts None
    default: Any
    section: str  # the title of the flag's section
    help: str
    choices: Collection[str] | None = None  # plug-ins may add choices to the tables in `choices`
    metavar: str | None = None
    # The first number of a pair if only the second number is given; None if both are required.
    single: float | None = None
    ge: float | None = None  # bounds apply to each number in a pair
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    # "model" and "dataset": comma-separated paths or Hub names. "place": a path on this machine.
    holds: Literal["model", "dataset", "place"] | None = None
    writes: str = ""  # the kind of output that the command writes to this path (see `places`)
    obsolete: bool = False  # True if the flag never has an effect
    not_yet: str = ""  # what to do instead, if any value other than the default is refused
    required: bool = False  # None until the user sets it; `check()` reports it if missing
    # Another flag in the section. This flag has no effect unless (or if) the other flag is set.
    needs: str = ""
    unless: str = ""
    saved: bool = True  # False: left out of configuration files
    secret: bool = False  # never shown

    @property
    def name(self) -> str:
        """The flag as typed on the command line."""
        return f"--{self.path}"

    @property
    def switches(self) -> dict[str, bool]:
        """The spellings of the flag, with the value that each one sets if the flag is a switch.

        A switch that is on by default has a second spelling that turns it off.
        """
        spellings = {self.name: True}
        if self.shape == "switch" and self.default:
            section, dot, leaf = self.path.rpartition(".")
            spellings[f"--{section}{dot}no_{leaf}"] = False
        return spellings

    @property
    def limits(self) -> dict[str, float]:
        """The bounds that are set, by name."""
        bounds = {name: getattr(self, name) for name in BOUNDS}
        return {name: limit for name, limit in bounds.items() if limit is not None}

    def allows(self, number: float) -> bool:
        """Return whether a number is within the bounds. NaN is never within the bounds."""
        if number != number:
            return False
        return all(BOUNDS[name][1](number, limit) for name, limit in self.limits.items())

    def typed(self, value: Any) -> str:
        """Return the command-line words that set this value; for a switch, only its name."""
        if self.shape == "switch":
            return self.name
        if self.secret and value is not None:
            value = HIDDEN
        values: list[Any] = [hide(value)]
        if self.shape in ("pair", "list"):
            values = hide(value) or []
        words = [f"{each:g}" if isinstance(each, float) else str(each) for each in values]
        return " ".join([self.name, *words])


FOR_OLDER_SCRIPTS = "in any command (accepted only for older scripts)"


@dataclass(frozen=True)
class Unused:
    """Flags and sections that have no effect, and the reason.

    In a section, flag names are relative to the section, even in `why`: "without --rank".
    """

    names: Sequence[str]
    why: str
    but: Sequence[str] = ()  # sections whose flags nevertheless have an effect


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Section:
    """Base class that turns subclasses into frozen, keyword-only dataclasses of flags and
    subsections.

    The docstring is the section's heading in the help; subclasses inherit it.
    """

    def __init_subclass__(cls) -> None:
        cls.__doc__ = cls.__doc__ or cls.__mro__[1].__doc__
        dataclass(frozen=True, kw_only=True)(cls)

    def unused(self) -> Iterator[Unused]:
        """Yield the flags that have no effect with the current settings."""
        yield from ()


def option(default: T, help: str, **info: Any) -> T:
    """Declare a flag. `info` sets the optional fields of `Flag`."""
    return field(default_factory=lambda: copy(default), metadata={"help": help, **info})


def switch(help: str, **info: Any) -> bool:
    """Declare a switch that is off by default."""
    return option(False, help, **info)


def count(default: int, help: str, **info: Any) -> int:
    """Declare a whole number of at least 1."""
    return option(default, help, ge=1, **info)


def unset(help: str, **info: Any) -> Any:
    """Declare a flag that is None until the user sets it or `resolve()` derives its value."""
    return option(None, help, **info)


def required(help: str, **info: Any) -> Any:
    """Declare a flag that the command requires."""
    return unset(help, required=True, **info)


@cache
def flags_of(root: type[Any]) -> Mapping[str, Flag]:
    """Return all flags of a configuration class, keyed by path, in declaration order."""
    return {flag.path: flag for flag in _walk(root(), "")}


def _walk(node: Any, prefix: str) -> Iterator[Flag]:
    for attribute in fields(node):
        path = prefix + attribute.name
        default = getattr(node, attribute.name)
        if is_dataclass(default):
            yield from _walk(default, f"{path}.")
        elif "help" in attribute.metadata:  # other fields, such as `given`, are not flags
            annotation = str(attribute.type)
            shape, kind = TYPES[annotation.removesuffix(" | None")]
            yield Flag(
                path=path,
                shape=shape,
                kind=kind,
                optional=default is None or annotation.endswith(" | None"),
                default=default,
                **{"section": node.__doc__, **attribute.metadata},
            )


def flags_in(config: Any) -> list[tuple[Flag, Any]]:
    """Return every flag of a configuration with its value."""
    return [(flag, value_at(config, path)) for path, flag in flags_of(config.__class__).items()]


def value_at(config: Any, path: str) -> Any:
    """Return the value or section at a dotted path.

    Raises AttributeError if the path does not exist.
    """
    return operator.attrgetter(path)(config)


def amend(config: T, values: Mapping[str, Any]) -> T:
    """Return a copy of the configuration with these values at their dotted paths."""
    changed: dict[str, Any] = {}
    for path, value in values.items():
        name, _, rest = path.partition(".")
        if rest:
            section = changed.get(name, getattr(config, name))
            value = amend(section, {rest: value})
        changed[name] = value
    return replace(cast(Any, config), **changed)


def items(text: str | None) -> list[str]:
    """Return the stripped, non-empty parts of a comma-separated list."""
    parts = [part.strip() for part in (text or "").split(",")]
    return [part for part in parts if part]


def dataset_parts(name: str) -> tuple[str, str]:
    """Split the name of a dataset into a path and the folder after @, or an empty string.

    An existing path may itself contain @.
    """
    if os.path.exists(name):
        return name, ""
    path, _, folder = name.partition("@")
    return path, folder


def spelled_out(config: Any, sentences: Iterable[str]) -> list[str]:
    """Replace each <flag> in the sentences with the flag and its value: --train.seed 42."""
    typed = {flag.path: flag.typed(value) for flag, value in flags_in(config)}
    return [re.sub(r"<([\w.]+)>", lambda m: typed.get(m[1], m[0]), text) for text in sentences]


def mentions(text: str, paths: Iterable[str]) -> bool:
    """Return whether a sentence mentions one of these flags."""
    return any(re.search(rf"--{re.escape(path)}(?![\w.]*\w)", text) for path in paths)


def convert(flag: Flag, raw: Any) -> Any:
    """Convert command-line words, or a value from a YAML file, to the type of a flag.

    An empty text, as an unset shell variable leaves it, is None for flags that accept None. A
    leading ~ in a path is expanded to the home folder. Raises ConfigError with a message that
    names the flag.
    """
    if raw in (None, "") and flag.optional:
        return None
    match flag.shape:
        case "switch":
            if isinstance(raw, bool):
                return raw
            raise ConfigError(f"{flag.name} is a switch: it must be true or false, not {raw!r}.")
        case "json":
            return _json_object(flag, raw)
        case "one":
            return _scalar(flag, raw)
        case "pair" | "list":
            values = [raw]
            if isinstance(raw, list | tuple):
                values = [*cast("Sequence[Any]", raw)]
            if flag.single is not None and len(values) == 1:
                values = [flag.single, *values]
            if flag.shape == "pair" and len(values) != 2:
                raise ConfigError(f"{flag.name} takes two numbers, not {len(values)}: {values!r}.")
            return tuple(_scalar(flag, value) for value in values)


def _scalar(flag: Flag, raw: Any) -> Any:
    value = raw
    if isinstance(raw, bool):
        value = None
        if YAML_WORDS[raw] in (flag.choices or ()):
            value = YAML_WORDS[raw]
    value = _as_kind(flag.kind, value)
    if value is None:
        raise ConfigError(f"{flag.name} takes {TYPE_NAMES[flag.kind]}, not {raw!r}.")
    if flag.choices is not None and value not in flag.choices:
        raise ConfigError(_unknown_choice(flag, value, flag.choices))
    if flag.holds == "place":
        return os.path.expanduser(value)
    if flag.holds:
        parts = re.split(r"(,\s*)", value)
        return "".join(os.path.expanduser(part) for part in parts)
    return value


def _as_kind(kind: type, value: Any) -> Any:
    """Return the value as an int, float or str, or None if it cannot be converted."""
    if not isinstance(value, (str, int, float)):
        return None
    try:
        converted = kind(value)
    except (ValueError, OverflowError):
        return None
    if kind is int and isinstance(value, float) and converted != value:
        return None
    return converted


def _unknown_choice(flag: Flag, value: Any, choices: Collection[str]) -> str:
    meant = nearest(value, choices)
    if value == "grpo" and "group_norm" in choices:
        meant = ["group_norm"]
    sentence = f"{flag.name} must be one of {', '.join(choices)}, not {value!r}."
    sentence += did_you_mean(meant)
    if isinstance(choices, dict):  # a table that plug-ins extend
        sentence += " To add your own, register it with --plugin FILE.py."
    return sentence


def _json_object(flag: Flag, raw: Any) -> dict[str, Any]:
    value = raw
    if isinstance(raw, str):
        with suppress(json.JSONDecodeError):
            value = json.loads(raw)
    if not isinstance(value, dict):
        raise ConfigError(f'{flag.name} takes a JSON object, such as {{"name": 1}}, not {raw!r}.')
    return cast("dict[str, Any]", value)


def text_of(flag: str, file: str) -> str:
    """Return the text of the file that a flag names.

    Raises ConfigError if the file cannot be read or is not UTF-8.
    """
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {file} cannot be read as a UTF-8 text file: {error}") from error


def toml_beside(module: str, name: str = "") -> dict[str, Any]:
    """Return the content of a TOML file next to a module; `module` is its `__file__`.

    Without `name`, the file has the module's name.
    """
    name = name or f"{Path(module).stem}.toml"
    return tomllib.loads(Path(module).with_name(name).read_text(encoding="utf-8"))


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Return at most two known names that a user may have meant, the most similar first.

    Full names are compared, and so are their last parts. Last parts also match if one of them
    contains the other.
    """
    cutoff = 0.7
    if len(name) < 5:  # similar short names share few letters, for example dop and dpo
        cutoff = 0.6
    leaf = name.rpartition(".")[2]
    likeness: dict[str, float] = {}
    for path in known:
        known_leaf = path.rpartition(".")[2]
        whole = _similarity(name, path)
        last = _similarity(leaf, known_leaf)
        if len(leaf) > 2 and (known_leaf.startswith(leaf) or leaf.endswith(f"_{known_leaf}")):
            last = max(last, 0.9)
        if whole >= cutoff or last >= 0.8:
            likeness[path] = whole + last
    return sorted(likeness, key=likeness.__getitem__, reverse=True)[:2]


def _similarity(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def did_you_mean(names: Collection[str]) -> str:
    """Return a suggestion to append to a message about an unknown name, or an empty string."""
    if not names:
        return ""
    return f" Did you mean {' or '.join(names)}?"


def value_violations(config: Any) -> Iterator[str]:
    """Yield a sentence for each required flag that is not set and each value out of bounds."""
    for flag, resolved in flags_in(config):
        value = resolved
        if flag.default is None:
            value = config.given.get(flag.path)  # check the user's value, not the derived one
        if flag.required and value in (None, ""):
            yield f"{flag.name} is required. {flag.help}"
        numbers: tuple[Any, ...] = (value,)
        if isinstance(value, tuple):
            numbers = cast("tuple[Any, ...]", value)
        for number in numbers:
            if isinstance(number, (int, float)) and not flag.allows(number):
                words = [f"{BOUNDS[name][0]} {limit:g}" for name, limit in flag.limits.items()]
                bounds = " and ".join(words) or "a number"
                yield f"{flag.name} is {number}, but it must be {bounds}."
                break
