"""Translates flag names and values of earlier releases to current flags, with a notice.

All commands share the tables in `legacy_names`. Each command uses the entries for its own flags.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from openrlhf.config.flags import Flag
from openrlhf.config.legacy_names import (
    IGNORED,
    INFERENCE_NAMES,
    INFERENCE_PARTS,
    MOVED,
    NAMES,
    PARTS,
    REMOVED,
    RL_NAMES,
    RL_PARTS,
    SWITCHES,
)
from openrlhf.config.legacy_values import OLD_FLAGS

CRITIC_FLAGS = ("algo.advantage.lambd", "critic.value_clip")
OLD_LENGTHS = ("prompt_max_len", "generate_max_len")  # each flag defaulted to 1024 tokens
Group = tuple[str, list[str]]  # a flag as typed (without its dashes), and the words after it


@dataclass(kw_only=True)
class Translation:
    """A command line with current flag names, and the messages about old names."""

    groups: list[Group]
    notices: list[str]
    violations: list[str]
    renamed: dict[str, str]  # the current spelling of each old name
    # The typed name of each flag in `legacy_values`, which `options` translates.
    spelled: dict[str, str]

    def replace(self, old: str, paths: Sequence[str], words: list[str], value: str = "") -> None:
        """Replace an old flag with the flags `paths`. If `words` are new, `value` shows them."""
        self.groups += [(path, words) for path in paths]
        if paths[0] in OLD_FLAGS:
            self.spelled[paths[0]] = old
        else:
            self.renamed[old] = " and ".join(f"--{path}" for path in paths) + value


def aliases(
    flags: Mapping[str, Flag], more: Mapping[str, str] | None = None
) -> dict[str, list[str]]:
    """Map each old name, and each name in `more`, to the flags that take its value.

    `flags` contains the old flags in `legacy_values`, too.
    """
    names = dict.fromkeys(PARTS, "") | NAMES
    if "algo.advantage.estimator" in flags:
        names |= dict.fromkeys(RL_PARTS, "") | RL_NAMES
    elif "csft.enable" in flags:
        names |= dict.fromkeys(INFERENCE_PARTS, "") | INFERENCE_NAMES
    if more:
        names |= more
    by_last_parts = _paths_by_last_parts(flags)
    known: dict[str, list[str]] = {}
    for name, targets in names.items():
        paths = [path for path in targets.split() if path in flags]
        if not targets:
            paths = by_last_parts.get(name, [])
        if paths:
            known[name] = paths
    return known


def _paths_by_last_parts(flags: Iterable[str]) -> dict[str, list[str]]:
    """Map names such as lora_rank to paths such as ds.lora.rank. A trailing _enable is dropped."""
    found: dict[str, list[str]] = {}
    for path in flags:
        parts = path.removesuffix("_enable").split(".")
        for start in range(len(parts)):
            found.setdefault("_".join(parts[start:]), []).append(path)
    return found


def translate(groups: Iterable[Group], flags: Mapping[str, Flag]) -> Translation:
    """Return the command line with old names replaced. Other names are unchanged.

    `flags` contains the old flags in `legacy_values`, too.
    """
    known = aliases(flags)
    result = Translation(groups=[], notices=[], violations=[], renamed={}, spelled={})
    lengths: dict[str, str] = {}
    for name, words in groups:
        value = " ".join(words)
        old = name
        extra = value
        with_value = f"{name}={value}"
        if with_value in SWITCHES or with_value in IGNORED:
            old = with_value
            extra = ""
        path, _, new = SWITCHES.get(old, "").partition(" ")
        if name in known:
            result.replace(name, known[name], words)
        elif path in flags and (not extra or "{}" in new):
            new = new.replace("{}", extra)
            result.replace(old, [path], [new], f" {new}")
        elif path in flags.keys() - OLD_FLAGS or (old in IGNORED and extra):
            result.violations.append(takes_no_value(f"--{name}", words, path))
        elif old in IGNORED:
            result.notices.append(f"--{old} no longer has an effect: {IGNORED[old]}.")
        elif name in REMOVED:
            result.violations.append(f"--{name} no longer exists. {REMOVED[name]}")
        elif name in OLD_LENGTHS and "rollout.max_new_tokens" in flags:
            lengths[name] = value
        else:
            result.groups.append((name, words))
    typed = dict(result.groups)
    only_response = "max_new_tokens" in result.renamed and "output_path" in flags
    if lengths or (only_response and "data.max_len" not in typed and "config" not in typed):
        _translate_lengths(lengths, "".join(typed.get("rollout.max_new_tokens", [])), result)
    if result.renamed:
        renames = "; ".join(f"--{old} is now {new}" for old, new in result.renamed.items())
        notices = [f"{renames}."]
        if any("." not in name for name in result.renamed):
            notices += _moved_defaults(dict(result.groups), flags)
        result.notices.insert(0, " ".join(notices))
    return result


def _moved_defaults(typed: Mapping[str, Sequence[str]], flags: Mapping[str, Flag]) -> list[str]:
    """Return one sentence about omitted flags whose defaults have changed since older releases."""
    idle: tuple[str, ...] = ()
    if "eval.dataset" not in typed:
        idle += ("eval.split",)
    if typed.get("algo.advantage.estimator", ["gae"]) != ["gae"]:
        idle += CRITIC_FLAGS
    changed: list[str] = []
    for path, before in MOVED.items():
        is_open = path in flags and path not in typed and path not in idle
        if is_open and str(flags[path].default) != before:
            changed.append(f"--{path} {flags[path].default} (was {before})")
    if not changed or "config" in typed:  # the file may set these flags
        return []
    return [
        "Some defaults have changed since older releases. This command uses the new ones: "
        f"{', '.join(changed)}."
    ]


def takes_no_value(name: str, words: Sequence[str], path: str = "") -> str:
    """Return the message about a switch that is followed by words.

    `path` is the current flag that takes the value, if any.
    """
    instead = f"leave {' '.join(words)} out"
    if path:
        instead += f", or set --{path}"
    return f"{name} is a switch and takes no value, not even true or false: {instead}."


def _translate_lengths(lengths: Mapping[str, str], new_tokens: str, result: Translation) -> None:
    """Replace the old prompt and response lengths with current flags.

    `new_tokens` is the value of --rollout.max_new_tokens, or an empty string.
    """
    for name, text in lengths.items():
        if not text.isdecimal():
            result.violations.append(f"--{name} takes a whole number, not {text!r}.")
            return
    prompt, response = (int(lengths.get(name, "1024")) for name in OLD_LENGTHS)
    if new_tokens.isdecimal():  # otherwise, --rollout.max_new_tokens is reported as invalid
        response = int(new_tokens)
    total = prompt + response
    # Current flags come later on the command line and take precedence.
    result.groups[:0] = [
        ("data.max_len", [str(total)]),
        ("rollout.max_new_tokens", [str(response)]),
    ]
    old = " and --".join(lengths or ["max_new_tokens"])
    result.renamed[old] = (
        f"--data.max_len {total} (prompt and response) and --rollout.max_new_tokens {response}"
    )
