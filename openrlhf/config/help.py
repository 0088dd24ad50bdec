"""What `--help` prints: what is required and which sections there are; `--help all` or `--help
WORD` lists flags.
"""

import textwrap
from collections import Counter
from collections.abc import Collection
from typing import Any

from openrlhf.config.flags import Flag, flags_of
from openrlhf.config.unsupported import is_refused

WIDTH, INDENT = 100, 32
FOOTER = """
--help all lists every flag, --help WORD the flags with this word in their name or description.
Unique beginnings of a flag and the flat names of older releases are accepted. Values come from the
defaults, then from the file of --config, then from the flags."""


def help_text(root: type[Any], command: str, *, topic: str = "") -> str:
    """The help of a command: short, all of it (`all`), or the flags whose name or description has
    `topic` in it.
    """
    flags = flags_of(root)
    defaults = root()
    head = f"usage: openrlhf {command} [--config FILE.yaml] [--flag VALUE ...]\n\n{root.__doc__}"
    if not topic or topic.startswith("-"):
        needed = [_entry(flag, defaults) for flag in flags.values() if flag.required]
        return "\n".join(
            [
                head,
                "\nRequired:",
                *needed,
                "\nSections:",
                *_sections(flags.values(), defaults),
                FOOTER,
            ]
        )
    word = topic.lower().lstrip("-")
    shown = [
        flag
        for flag in flags.values()
        if topic == "all" or word in f"{flag.path} {flag.help}".lower()
    ]
    if not shown:
        return f"{command} has no flag with {topic} in its name or description: try --help all."
    lines, section = [head] if topic == "all" else [], None
    for flag in shown:
        if (name := flag.path.rpartition(".")[0]) != section:
            section = name
            lines.append(f"\n{name}.* ({flag.section.rstrip('.')}):" if name else "\nNo section:")
        lines.append(_entry(flag, defaults))
    return "\n".join(lines)


def _sections(flags: Collection[Flag], defaults: Any) -> list[str]:
    """One line for each first part of a name, then the flags without one."""
    firsts = Counter(flag.path.partition(".")[0] for flag in flags if "." in flag.path)
    lines = [
        f"  {name + '.*':14}{count:3} flags  {getattr(defaults, name).__doc__}"
        for name, count in firsts.items()
    ]
    return [*lines, *(_entry(flag, defaults) for flag in flags if "." not in flag.path)]


def _entry(flag: Flag, defaults: Any) -> str:
    choices = ",".join(flag.choices or ())
    many = f" One of {choices.replace(',', ', ')}." if len(choices) > 60 else ""
    kind = flag.metavar or {int: "INT", float: "NUMBER"}.get(flag.kind, "TEXT")
    value = "NAME" if many else f"{{{choices}}}" if choices else kind
    count = {"switch": "", "pair": f" {value} {value}", "list": f" [{value} ...]"}
    names = " | ".join(flag.switches) + count.get(flag.shape, f" {value}")
    later = " Not available yet." if is_refused(flag.path, defaults) else ""
    text = textwrap.wrap(f"{flag.help}{_default(flag)}{many}{later}", WIDTH - INDENT)
    first, rest = (text[0], text[1:]) if len(names) <= INDENT - 4 else ("", text)
    lines = [f"  {names:{INDENT - 2}}{first}".rstrip(), *(" " * INDENT + line for line in rest)]
    return "\n".join(lines)


def _default(flag: Flag) -> str:
    if flag.shape == "switch":
        return " (on)" if flag.default else ""
    if flag.default is None or flag.default in ("", (), {}):
        return " (required)" if flag.required else ""
    shown = flag.typed(flag.default)[len(flag.name) + 1 :]
    return f" ({shown!r})" if "\n" in shown else f" ({shown})"
