"""Text of `--help`: required flags and sections. `--help all` and `--help WORD` list flags."""

import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from openrlhf.config.flags import Flag, flags_of
from openrlhf.config.methods import command_of_method

WIDTH = 100
INDENT = 32
WIDEST_CHOICES = 60
FOOTER = """
--help all: every flag. --help WORD: flags with this word. --help_json: a JSON schema.
Unique prefixes and flat names of older releases are accepted. Flags override --config."""


def _program(command: str) -> str:
    """Return the words that the user typed to start the command."""
    words = [word for word in sys.argv[1:] if word != "help"]
    if Path(sys.argv[0]).name == "openrlhf" and words:
        return f"openrlhf {words[0]}"
    return f"python -m openrlhf.cli.{command}"


def help_text(root: type[Any], command: str, *, topic: str = "") -> str:
    """Return the help of a command: an overview, or the flags that a topic selects.

    The topic `all` selects all flags; any other topic selects the flags with this word in their
    name, description or choices, or the flags of the method with this name, such as `dapo`.
    """
    head = f"usage: {_program(command)} [--config FILE.yaml] [--flag VALUE ...]\n\n{root.__doc__}"
    flags = list(flags_of(root).values())
    if topic == "all":
        return "\n".join([head, *_entries_by_section(flags)])
    if not topic or topic.startswith("-"):
        return "\n".join([head, *_overview(root(), flags), FOOTER])
    of_method = (command_of_method(topic) or "").split()
    found: list[Flag] = []
    for flag in flags:
        text = f"{flag.path} {flag.help} {' '.join(flag.choices or ())}"
        if topic.lower() in text.lower() or flag.name in of_method:
            found.append(flag)
    if not found:
        return f"{command} has no flag whose text or choices contain {topic}: try --help all."
    return "\n".join(_entries_by_section(found))


def _overview(defaults: Any, flags: list[Flag]) -> Iterator[str]:
    """Yield the required flags, one line per section, and the flags outside sections."""
    required = [flag for flag in flags if flag.required]
    if required:
        yield "\nRequired:"
    for flag in required:
        yield _entry(flag)
    sections = Counter(flag.path.partition(".")[0] for flag in flags if "." in flag.path)
    yield "\nSections:" if sections else ""
    for name, count in sections.items():
        yield f"  {name + '.*':14}{count:3} flags  {getattr(defaults, name).__doc__}"
    for flag in flags:
        if "." not in flag.path:
            yield _entry(flag)


def _entries_by_section(flags: list[Flag]) -> Iterator[str]:
    previous = None
    for flag in flags:
        section = flag.path.rpartition(".")[0]
        if section != previous and section:
            yield f"\n{section}.* ({flag.section.rstrip('.')}):"
        elif section != previous:
            yield "\nNo section:"
        previous = section
        yield _entry(flag)


def _entry(flag: Flag) -> str:
    """Return a flag's help lines: its spellings, and its description in a second column."""
    spellings = " | ".join(flag.switches) + _placeholders(flag)
    description = flag.help + _default(flag)
    if _has_many_choices(flag):
        description += f" One of {', '.join(flag.choices or ())}."
    if flag.not_yet:
        description += " Not available yet."
    margin = " " * INDENT
    left = f"  {spellings}"
    text = textwrap.fill(description, WIDTH, initial_indent=margin, subsequent_indent=margin)
    if len(left) <= INDENT - 2:
        return left + text[len(left) :]
    return f"{left}\n{text}"


def _placeholders(flag: Flag) -> str:
    """Return the placeholders for a flag's values, with a leading space."""
    value = flag.metavar or {int: "INT", float: "NUMBER"}.get(flag.kind, "TEXT")
    if _has_many_choices(flag):
        value = "NAME"
    elif flag.choices:
        value = f"{{{','.join(flag.choices)}}}"
    forms = {"switch": "", "pair": f" {value} {value}", "list": f" [{value} ...]"}
    if flag.single is not None:
        return f" [{value}] {value}"
    return forms.get(flag.shape, f" {value}")


def _has_many_choices(flag: Flag) -> bool:
    return len(",".join(flag.choices or ())) > WIDEST_CHOICES


def _default(flag: Flag) -> str:
    """Return a flag's default in parentheses, with a leading space."""
    if flag.required:
        return " (required)"
    if flag.default is True:
        return " (on)"
    if flag.default is False or flag.default in (None, "", (), {}):
        return ""
    shown = flag.typed(flag.default).removeprefix(f"{flag.name} ")
    if "\n" in shown:
        shown = repr(shown)
    return f" ({shown})"
