"""The flags that users depend on: names, types, defaults and choices.

The flags are compared with a table written from the specification.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from openrlhf.config.flags import Flag, convert, flags_of, value_at
from tests.config.commands import ROOTS, read_flags

EXPECTED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "expected_flags.json").read_text()
)
EVERY_FLAG = [(command, name) for command, table in EXPECTED.items() for name in table]
SHAPES = {"switch": "switch", "json": "json", "pair": "two numbers"}
KINDS = {str: "text", int: "int", float: "number"}


def type_of(flag: Flag) -> str:
    if flag.shape == "list":
        return KINDS[flag.kind] + "s"
    return SHAPES.get(flag.shape) or KINDS[flag.kind]


@pytest.mark.parametrize("command", ROOTS)
def test_command_has_exactly_the_flags_in_the_table(command: str) -> None:
    assert sorted(flags_of(ROOTS[command])) == sorted(EXPECTED[command])


@pytest.mark.parametrize(("command", "name"), EVERY_FLAG)
def test_flag_has_the_type_the_default_and_the_choices_listed_in_the_table(
    command: str, name: str
) -> None:
    flag, expected = flags_of(ROOTS[command])[name], EXPECTED[command][name]
    default = list(flag.default) if isinstance(flag.default, tuple) else flag.default
    assert type_of(flag) == expected["type"]
    assert default == expected["default"]
    if "choices" in expected:
        assert list(flag.choices or ()) == expected["choices"]


def test_number_of_flag_spellings_matches_the_reference() -> None:
    spellings: dict[str, int] = {}
    for command, root in ROOTS.items():
        flags = [
            flag for flag in flags_of(root).values() if "added" not in EXPECTED[command][flag.path]
        ]
        spellings[command] = sum(len(flag.switches) for flag in flags)
    assert spellings["train_sft"] == 77
    assert spellings["train_rm"] == 79
    assert spellings["train_dpo"] == 82
    # The reference's --actor.loss_agg_mode counts here as an alias of --algo.loss.aggregation.
    assert spellings["train_ppo_ray"] == 166
    assert spellings["serve_rm"] == 14


def sample(flag: Flag) -> tuple[list[str], Any]:
    """Return arguments that set a flag to a non-default value, and return the value."""
    if flag.shape == "switch":
        return [], True
    if flag.shape == "json":
        return ['{"a": 1}'], {"a": 1}
    if flag.shape == "pair":
        return ["0.25", "0.75"], (0.25, 0.75)
    if flag.choices:
        other = next(choice for choice in flag.choices if choice != flag.default)
        return [other], other
    word, value = {str: ("text", "text"), int: ("7", 7), float: ("0.125", 0.125)}[flag.kind]
    return ([word, word], (value, value)) if flag.shape == "list" else ([word], value)


@pytest.mark.parametrize(("command", "name"), [(c, n) for c, n in EVERY_FLAG if n != "plugin"])
def test_every_flag_parses_in_both_spellings(command: str, name: str) -> None:
    words, value = sample(flags_of(ROOTS[command])[name])
    apart, _ = read_flags(ROOTS[command], [f"--{name}", *words], command=command)
    assert apart == {name: value}
    if len(words) == 1:
        joined, _ = read_flags(ROOTS[command], [f"--{name}={words[0]}"], command=command)
        assert joined == {name: value}


@pytest.mark.parametrize("command", ROOTS)
def test_every_flag_has_a_help_sentence_in_ascii(command: str) -> None:
    for flag in flags_of(ROOTS[command]).values():
        assert re.fullmatch(r"[ -~]+\.", flag.help), flag.path
        assert flag.section.isascii(), flag.path


@pytest.mark.parametrize("command", ROOTS)
def test_every_flag_accepts_its_default(command: str) -> None:
    for flag in flags_of(ROOTS[command]).values():
        raw = list(flag.default) if isinstance(flag.default, tuple) else flag.default
        assert convert(flag, raw) == flag.default, flag.path


@pytest.mark.parametrize("command", ROOTS)
def test_flag_path_equals_attribute_path(command: str) -> None:
    config = ROOTS[command]()
    for flag in flags_of(ROOTS[command]).values():
        assert value_at(config, flag.path) == flag.default


def test_flag_of_nested_sections_is_an_attribute_of_the_innermost_section() -> None:
    assert (
        ROOTS["train_sft"]().ds.lora.rank
        == flags_of(ROOTS["train_sft"])["ds.lora.rank"].default
        == 0
    )
