"""From a command line and a configuration file to a resolved, checked tree, and back to a file.

`parse_config` is the entry of every command. It raises `ConfigError` with everything that is wrong
at once; the command prints that to stderr and exits with status 2.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol, Self, TypeVar, cast

from openrlhf.config import legacy, unsupported
from openrlhf.config.flags import ConfigError, Flag, amend, convert, did_you_mean, flags_in, flags_of, nearest, option
from openrlhf.config.plugins import load_plugins
from openrlhf.config.shared import Command, Root

__all__ = [
    "Command",
    "ConfigError",
    "Parsable",
    "Root",
    "dump_yaml",
    "load_named_plugins",
    "option",
    "parse_config",
    "read_flags",
]


class Parsable(Protocol):
    """The root of a command's flags."""

    def resolve(self, explicit: frozenset[str] = ..., *, command: str = ...) -> tuple[Self, list[str]]:
        """A copy with all derived values, and notices."""
        ...

    def check(self) -> list[str]:
        """All that is wrong, one sentence each."""
        ...


R = TypeVar("R", bound=Parsable)


def parse_config(root: type[R], argv: Sequence[str] | None = None, *, command: str) -> R:
    """The resolved and checked configuration of a command line (None: this process's).

    Prints notices to stderr, in rank 0 only. `--help` prints and exits. Raises ConfigError.
    """
    given, old = read_flags(root, sys.argv[1:] if argv is None else argv, command=command)
    config, notices = amend(root(), given).resolve(frozenset(given), command=command)
    violations = config.check()
    if os.environ.get("RANK", "0") == "0":
        # What is derived from a mistake would only mislead.
        for notice in old if violations else [*old, *notices]:
            print(f"[notice] {notice}", file=sys.stderr)
    if violations:
        raise ConfigError(violations)
    return config


def read_flags(root: type[Any], argv: Sequence[str], *, command: str) -> tuple[dict[str, Any], list[str]]:
    """The values by path that flags and `--config` give, and notices; flags win. Loads plug-ins.

    Defaults are not among them. Raises ConfigError for unknown names and values that do not fit.
    """
    flags = flags_of(root)
    old = legacy.translate(argv, flags, command=command)
    namespace, extras = _parser(flags, root, command).parse_known_args(old.argv)
    typed = vars(namespace)
    file = typed.pop("config", None)
    written, wrong_keys = read_yaml(file, flags, command) if file else ({}, [])
    problems = [*old.violations, *_unknown(extras, flags, command), *wrong_keys]
    raw = written | typed
    load_plugins(convert(flags["plugin"], raw.get("plugin") or []))
    values: dict[str, Any] = {}
    for path, value in raw.items():
        if value is None and flags[path].default is None:
            continue  # null in a file where nothing is the default
        try:
            values[path] = convert(flags[path], value)
        except ValueError as error:
            problems.append(f"{file}: {error}" if path not in typed else str(error))
    if problems:
        raise ConfigError(problems)
    return values, old.notices


def load_named_plugins(argv: Sequence[str]) -> None:
    """Load the plug-ins that a command line, or its configuration file, names, whatever command it is for. Raises ConfigError."""
    parser, flags = _Parser(add_help=False, argument_default=argparse.SUPPRESS), flags_of(Root)
    parser.add_argument("--config")
    _add(parser, flags["plugin"])
    typed = vars(parser.parse_known_args(argv)[0])
    written = read_yaml(typed["config"], flags, "")[0] if "config" in typed else {}
    load_plugins(convert(flags["plugin"], (written | typed).get("plugin") or []))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


def _parser(flags: Mapping[str, Flag], root: type[Any], command: str) -> argparse.ArgumentParser:
    """An argparse parser that only tells names from values: conversion and checks come later."""
    parser = _Parser(
        prog=f"openrlhf {command}",
        usage="%(prog)s [--config FILE] [--flag VALUE ...]",
        description=f"{root.__doc__} Unique beginnings of a flag and the flat names of older "
        "releases are accepted; values come from the defaults, then the file, then the flags.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32, width=100),
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--config", metavar="FILE.yaml", help="Configuration file; flags win.")
    groups: dict[str, Any] = {}
    for flag in flags.values():
        section = flag.path.rpartition(".")[0]
        if section not in groups:
            title = f"{section}.* ({flag.section.rstrip('.')})" if section else "no section"
            groups[section] = parser.add_argument_group(title)
        _add(groups[section], flag)
    return parser


def _add(group: Any, flag: Flag) -> None:
    later = " Not available yet." if unsupported.is_refused(flag.path) else ""
    text = f"{flag.help} {_default_text(flag)}{later}".replace("%", "%%")
    if flag.shape == "switch":
        for spelling, meaning in flag.switches.items():
            shown = text if meaning else f"The opposite of {flag.name}."
            group.add_argument(spelling, dest=flag.path, action="store_const", const=meaning, help=shown)
        return
    metavar = flag.metavar or {int: "INT", float: "NUMBER"}.get(flag.kind, "TEXT")
    if choices := ",".join(flag.choices or ()):
        metavar = f"{{{choices}}}"
        if len(choices) > 60:
            metavar, text = "NAME", f"{text} One of {choices.replace(',', ', ')}."
    arity = {"pair": {"nargs": 2}, "list": {"nargs": "*", "action": "extend"}}
    more = arity.get(flag.shape, {})
    group.add_argument(flag.name, dest=flag.path, metavar=metavar, help=text, **more)


def _default_text(flag: Flag) -> str:
    if flag.shape == "switch":
        return "(on)" if flag.default else ""
    if flag.default is None or flag.default in ("", (), {}):
        return "(required)" if flag.required else ""
    shown = flag.typed(flag.default)[len(flag.name) + 1 :]
    return f"({shown!r})" if "\n" in shown else f"({shown})"


def _unknown(extras: Sequence[str], flags: Mapping[str, Flag], command: str) -> list[str]:
    names = [token.partition("=")[0] for token in extras if token.startswith("--")]
    if extras and not names:
        return [f"{' '.join(extras)} follows no flag that takes it."]
    return [_no_such(name, flags, command) for name in names]


def _no_such(name: str, flags: Mapping[str, Flag], command: str) -> str:
    """`name` as typed, with -- on the command line and without it in a file."""
    bare = name.removeprefix("--")
    dashes = name.removesuffix(bare)
    old = legacy.aliases(flags, command=command)
    spellings = [spelling[2:] for flag in flags.values() for spelling in flag.switches]
    close = old.get(bare) or nearest(bare, [*spellings, *old])
    targets = dict.fromkeys(dashes + path for each in close for path in old.get(each, (each,)))
    return f"{command} has no flag {name}.{did_you_mean(targets)}"


def read_yaml(file: str, flags: Mapping[str, Flag], command: str) -> tuple[dict[str, Any], list[str]]:
    """The values of a file by path (keys nested or dotted), and what is wrong with its keys.

    Raises ConfigError when it cannot be read.
    """
    import yaml  # only runs with a file pay for it

    try:
        content: Any = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {file} cannot be read: {error}") from error
    if not isinstance(content, dict | None):
        kind = type(content).__name__
        raise ConfigError(f"--config {file} holds a {kind}, not names and values.")
    values: dict[str, Any] = {}
    problems: list[str] = []
    for path, value in _leaves(cast("dict[Any, Any]", content or {}), flags, ""):
        if path in values:
            problems.append(f"{file}: {path} is there twice.")
        elif path in flags:
            values[path] = value
        else:
            problems.append(f"{file}: {_no_such(path, flags, command)}")
    return values, problems


def _leaves(node: Mapping[Any, Any], flags: Mapping[str, Flag], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        path = f"{prefix}{key}"
        if path not in flags and isinstance(value, dict):
            yield from _leaves(cast("dict[Any, Any]", value), flags, f"{path}.")
        else:
            yield path, value


def dump_yaml(config: Any) -> str:
    """The configuration as YAML, for a person to read and for `--config` to read back.

    What belongs to one launch (`--dry_run`, `--local_rank`) and the W&B key are left out.
    """
    import yaml  # only runs that write a file pay for it

    tree: dict[str, Any] = {}
    for flag, value in flags_in(config):
        if flag.saved:
            *sections, leaf = flag.path.split(".")
            node = tree
            for section in sections:
                node = node.setdefault(section, {})
            node[leaf] = list(value) if flag.shape in ("pair", "list") and value else value
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
