"""Fields of dataclass trees as flags: how they are declared, found, converted and bounded.

A field's path from the root is its flag: `config.ds.lora.rank` is `--ds.lora.rank`. Name, type,
default and help are written once; parser, help, files and error messages come from there.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from types import UnionType
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")
C = TypeVar("C")
Shape = Literal["switch", "one", "pair", "list", "json"]
KINDS = {int: "a whole number", float: "a number", str: "a text"}


class ConfigError(ValueError):
    """A mistake of the user in the flags: all `violations`, a line of the message each."""

    def __init__(self, violations: str | Sequence[str]) -> None:
        self.violations = [violations] if isinstance(violations, str) else list(violations)
        many = len(self.violations) > 1
        lines = [f"{len(self.violations)} mistakes:"] if many else []
        super().__init__("\n  - ".join([*lines, *self.violations]))


@dataclass(frozen=True, kw_only=True)
class OptionInfo:
    """What a field says about its flag besides name, type and default."""

    help: str
    choices: Collection[str] | None = None  # may grow: plug-ins extend the tables in `choices`
    metavar: str | None = None
    ge: float | None = None  # bounds hold for each number of a pair
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    holds: Literal["model", "dataset"] | None = None  # a folder, a file or a hub name
    required: bool = False
    saved: bool = True  # False: left out of configuration files


def option(default: T, *, help: str, **info: Any) -> T:
    """A dataclass field that is a flag; further keywords are those of `OptionInfo`."""
    metadata = {"option": OptionInfo(help=help, **info)}
    if isinstance(default, Mapping):
        content = dict(cast("Mapping[str, Any]", default))
        return cast(T, field(default_factory=lambda: content.copy(), metadata=metadata))
    return cast(T, field(default=default, metadata=metadata))


def required(*, help: str, **info: Any) -> Any:
    """A flag the command cannot run without: None until it is given; `check()` asks for it."""
    return option(None, help=help, required=True, **info)


def derived(*, help: str, **info: Any) -> Any:
    """A flag that is None where it is not given, until `resolve()` fills it in."""
    return option(None, help=help, **info)


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One flag of a command, as the parser, the help and the surface tests see it."""

    path: str
    shape: Shape
    kind: type  # of a value; of each value of a pair or a list
    optional: bool  # None is a value
    default: Any
    section: str  # the first line of its section's docstring
    info: OptionInfo

    @property
    def name(self) -> str:
        """The flag as it is typed."""
        return f"--{self.path}"

    @property
    def switches(self) -> dict[str, bool]:
        """The spellings and what they set; a switch that is on by default has an opposite."""
        head, _, leaf = self.path.rpartition(".")
        off = f"--{head}.no_{leaf}" if head else f"--no_{leaf}"
        paired = self.shape == "switch" and self.default
        return {self.name: True} | ({off: False} if paired else {})


@cache
def flags_of(root: type[Any]) -> Mapping[str, Flag]:
    """Every flag of a configuration class by its path, in order of declaration."""
    return {flag.path: flag for flag in _walk(root(), prefix="")}


def flags_in(config: Any) -> list[tuple[Flag, Any]]:
    """The flags of a tree with their values."""
    root: type[Any] = config.__class__
    return [(flag, value_at(config, flag.path)) for flag in flags_of(root).values()]


def _walk(node: Any, prefix: str) -> Iterator[Flag]:
    owner: type[Any] = node.__class__
    hints = get_type_hints(owner)
    section = (owner.__doc__ or "").partition("\n")[0]
    for each in fields(node):
        value = getattr(node, each.name)
        if is_dataclass(value):
            yield from _walk(value, f"{prefix}{each.name}.")
            continue
        shape, kind, optional = _shape_of(hints[each.name])
        yield Flag(
            path=prefix + each.name,
            shape=shape,
            kind=kind,
            optional=optional or value is None,
            default=value,
            section=section,
            info=each.metadata["option"],
        )


def _shape_of(hint: Any) -> tuple[Shape, type, bool]:
    if isinstance(hint, UnionType):
        (inner,) = (part for part in get_args(hint) if part is not type(None))
        shape, kind, _ = _shape_of(inner)
        return shape, kind, True
    if hint is bool:
        return "switch", bool, False
    if get_origin(hint) is tuple:
        item, second = get_args(hint)
        return ("list" if second is Ellipsis else "pair"), item, False
    if get_origin(hint) is Mapping:
        return "json", dict, False
    return "one", hint, False


def value_at(config: Any, path: str) -> Any:
    """The value or section at a dotted path. AttributeError where there is none."""
    for name in path.split("."):
        config = getattr(config, name)
    return config


def amend(config: C, values: Mapping[str, Any]) -> C:
    """A copy of the tree with the values at these dotted paths."""
    inner: dict[str, dict[str, Any]] = {}
    own: dict[str, Any] = {}
    for path, value in values.items():
        head, _, rest = path.partition(".")
        if rest:
            inner.setdefault(head, {})[rest] = value
        else:
            own[head] = value
    own |= {head: amend(getattr(config, head), below) for head, below in inner.items()}
    return replace(cast(Any, config), **own)


def convert(flag: Flag, raw: Any) -> Any:
    """The value of a flag from what the command line (texts) or a file (YAML values) has for it.

    Raises ValueError with a sentence that names the flag.
    """
    if raw is None and flag.optional:
        return None
    if flag.shape == "switch":
        if not isinstance(raw, bool):
            raise ValueError(f"{flag.name} is a switch: true or false, not {raw!r}.")
        return raw
    if flag.shape == "json":
        return _json_object(flag, raw)
    if flag.shape == "one":
        return _scalar(flag, raw)
    items = cast("list[Any]", raw) if isinstance(raw, list) else [raw]
    if flag.shape == "pair" and len(items) != 2:
        raise ValueError(f"{flag.name} takes two numbers, not {len(items)}: {items!r}.")
    return tuple(_scalar(flag, item) for item in items)


def _scalar(flag: Flag, raw: Any) -> Any:
    wrong = ValueError(f"{flag.name} takes {KINDS[flag.kind]}, not {raw!r}.")
    choices = flag.info.choices
    if isinstance(raw, bool):  # YAML reads on and off as truth values
        raw = {True: "on", False: "off"}[raw] if choices and "on" in choices else None
    if not isinstance(raw, (str, int, float)):
        raise wrong
    try:
        value = flag.kind(raw)
    except (ValueError, OverflowError):
        raise wrong from None
    if flag.kind is int and isinstance(raw, float) and raw != value:
        raise wrong
    if choices is not None and value not in choices:
        close = nearest(value, choices)
        hint = f" Did you mean {' or '.join(close)}?" if close else ""
        raise ValueError(f"{flag.name} takes one of {', '.join(choices)}, not {value!r}.{hint}")
    return value


def _json_object(flag: Flag, raw: Any) -> dict[str, Any]:
    try:
        value = json.loads(raw) if isinstance(raw, str) else raw
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{flag.name} takes a JSON object, and {raw!r} is none: {error}."
        ) from None
    if not isinstance(value, dict):
        raise ValueError(f'{flag.name} takes a JSON object such as {{"name": 1}}, not {raw!r}.')
    return cast("dict[str, Any]", value)


def nearest(name: str, known: Collection[str], *, limit: int = 2) -> list[str]:
    """The known names a user may have meant: those with this last part first, then similar ones."""
    leaf = name.rpartition(".")[2]
    leaves = {path: path.rpartition(".")[2] for path in known}
    same = [path for path in known if leaves[path] == leaf]
    begun = [path for path in known if len(leaf) > 3 and leaves[path].startswith(leaf)]
    by_leaf = difflib.get_close_matches(name, same or begun, n=limit, cutoff=0.0)
    similar = difflib.get_close_matches(name, known, n=limit, cutoff=0.7)
    close = difflib.get_close_matches(leaf, leaves.values(), n=limit, cutoff=0.8)
    return list(dict.fromkeys([*by_leaf, *similar, *(p for p in known if leaves[p] in close)]))[
        :limit
    ]


def bound_violations(config: Any) -> list[str]:
    """Numbers outside the bounds of their flag, and required flags that are not set."""
    found: list[str] = []
    for flag, value in flags_in(config):
        if value is None and flag.info.required:
            found.append(f"{flag.name} must be given. {flag.info.help}")
        numbers = cast("tuple[Any, ...]", value if isinstance(value, tuple) else (value,))
        bad = [n for n in numbers if isinstance(n, (int, float)) and not _inside(n, flag.info)]
        if bad:
            found.append(f"{flag.name} is {bad[0]}, but it must be {bounds_text(flag.info)}.")
    return found


def _inside(number: float, info: OptionInfo) -> bool:
    return (
        number == number  # not a NaN
        and (info.ge is None or number >= info.ge)
        and (info.gt is None or number > info.gt)
        and (info.le is None or number <= info.le)
        and (info.lt is None or number < info.lt)
    )


def bounds_text(info: OptionInfo) -> str:
    """The bounds of a flag in words, such as `at least 0 and below 1`."""
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    limits = {name: getattr(info, name) for name in words}
    parts = [f"{words[name]} {limit:g}" for name, limit in limits.items() if limit is not None]
    return " and ".join(parts) or "a number"
