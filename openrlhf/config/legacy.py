"""Flat names and old values of earlier releases, translated to today's flags with a notice.

The tables are in `legacy.toml`. They serve all commands: a command takes those of the flags that it
has.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from openrlhf.config.flags import Flag, tables

TABLES = tables(__file__)
NAMES, RL_NAMES, ELSEWHERE = TABLES["names"], TABLES["rl_names"], TABLES["elsewhere"]
MOVED = TABLES["moved"]
SWITCHES, IGNORED, REMOVED = TABLES["switches"], TABLES["ignored"], TABLES["removed"]
OF_CRITICS = ("algo.advantage.lambd", "critic.value_clip")
OLD_LENGTHS = ("prompt_max_len", "generate_max_len")  # 1024 if not given
MOST_RENAMES = 3  # that a notice spells out
Group = tuple[
    str, list[str]
]  # a flag as it is typed, without its dashes, and the words that follow it


@dataclass(kw_only=True)
class Translation:
    """A command line in today's names."""

    groups: list[Group] = field(default_factory=list[Group])
    notices: list[str] = field(default_factory=list[str])
    violations: list[str] = field(default_factory=list[str])


def aliases(
    flags: Mapping[str, Flag], more: Mapping[str, str] | None = None
) -> dict[str, list[str]]:
    """The old names that a command understands, and `more`, with the flags that take their values."""
    own = (
        "rl_names"
        if "algo.advantage.estimator" in flags
        else "inference_names"
        if "csft.enable" in flags
        else ""
    )
    names = {**NAMES, **TABLES.get(own, {}), **(more or {})}
    known = {
        name: [path for path in paths.split() if path in flags] for name, paths in names.items()
    }
    return {name: paths for name, paths in known.items() if paths and name not in flags}


def translate(groups: Iterable[Group], flags: Mapping[str, Flag]) -> Translation:
    """The command line with old names replaced. What no alias covers stays as it is."""
    known, result = aliases(flags), Translation()
    renamed, lengths = dict[str, str](), dict[str, str]()
    for name, words in groups:
        if (whole := " ".join([name, *words])) in SWITCHES:
            name, words = whole, []
        path, _, value = SWITCHES.get(name, "").partition(" ")
        if name in known:
            if name == "vllm_is_truncated_threshold" and len(words) == 1:
                words = ["0", *words]  # it was an upper bound once
            result.groups += [(target, words) for target in known[name]]
            renamed[name] = " and ".join(f"--{target}" for target in known[name])
        elif words and "{}" not in value and (path in flags or name in IGNORED):
            result.violations.append(takes_no_value(f"--{name}", words, path))
        elif path in flags:
            value = value.replace("{}", " ".join(words))
            result.groups.append((path, [value]))
            renamed[name] = f"--{path} {value}"
        elif name in IGNORED:
            result.notices.append(f"--{name} has no effect any more: {IGNORED[name]}.")
        elif name in REMOVED:
            result.violations.append(f"--{name} is gone. {REMOVED[name]}")
        elif name in OLD_LENGTHS and "rollout.max_new_tokens" in flags:
            lengths[name] = " ".join(words)
        else:
            result.groups.append((name, words))
    typed = dict(result.groups)
    alone = (
        "max_new_tokens" in renamed
        and "output_path" in flags
        and not typed.keys() & {"data.max_len", "config"}
    )
    if lengths or alone:
        renamed |= _translate_lengths(
            lengths, "".join(typed.get("rollout.max_new_tokens", [])), result
        )
    if renamed:
        notices = [_renames(renamed, flags)]
        if any("." not in name for name in renamed):
            notices += _moved_defaults(dict(result.groups), flags)
        result.notices.insert(0, " ".join(notices))
    return result


def _moved_defaults(typed: Mapping[str, Sequence[str]], flags: Mapping[str, Flag]) -> list[str]:
    """Return one sentence about omitted flags whose defaults have changed since older releases."""
    if "config" in typed:  # a file may set them
        return []
    compares = typed.get("algo.advantage.estimator", ["gae"]) != ["gae"]  # without a critic
    changed: list[str] = []
    for path, before in MOVED.items():
        if path not in flags or path in typed or str(flags[path].default) == before:
            continue
        idle = (path == "eval.split" and "eval.dataset" not in typed) or (
            path in OF_CRITICS and compares
        )
        if not idle:
            changed.append(f"--{path} {flags[path].default} (was {before})")
    if not changed:
        return []
    return [
        f"Some defaults have changed since older releases. This command uses the new ones: {', '.join(changed)}."
    ]


def _renames(renamed: Mapping[str, str], flags: Mapping[str, Flag]) -> str:
    """One line for all old names."""
    if len(renamed) <= MOST_RENAMES:
        return "; ".join(f"--{old} is now {new}" for old, new in renamed.items()) + "."
    named = ", ".join(f"--{old}" for old in list(renamed)[:MOST_RENAMES])
    where = "config.yaml in the run folder has" if "run.dir" in flags else "--help lists"
    return f"{len(renamed)} flags have the names of older releases ({named}, ...): {where} today's names."


def takes_no_value(name: str, words: Sequence[str], path: str = "") -> str:
    """The sentence about a switch with words after it. `path`: the flag that takes a value."""
    instead = (
        f"leave {' '.join(words)} out, or set --{path}" if path else f"leave {' '.join(words)} out"
    )
    return f"{name} is a switch and takes no value, not even true or false: {instead}."


def _translate_lengths(
    lengths: Mapping[str, str], answer: str, result: Translation
) -> dict[str, str]:
    """Add the flags of old lengths, and of an `answer` of so many new tokens, to the groups;
    returns what became of them.
    """
    wrong = {name: text for name, text in lengths.items() if not text.isdigit()}
    result.violations += [
        f"--{name} takes a whole number, not {text!r}." for name, text in wrong.items()
    ]
    if wrong:
        return {}
    prompt, response = (int(lengths.get(name, "1024")) for name in OLD_LENGTHS)
    response = int(answer) if answer.isdigit() else response  # else its flag says what is wrong
    total = prompt + response
    # First: today's names win.
    result.groups[:0] = [
        ("data.max_len", [str(total)]),
        ("rollout.max_new_tokens", [str(response)]),
    ]
    today = f"--data.max_len {total} (prompt and response) and --rollout.max_new_tokens {response}"
    return {" and --".join(lengths or ["max_new_tokens"]): today}
