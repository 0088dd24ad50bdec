"""Tests that compare the commands' results with the recorded golden numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.goldens.record import GOLDENS, RECORDED, SLOW, machine

# A different processor or library version may compute sums in a different order.
RELATIVE, ABSOLUTE = 2e-2, 2e-3
EXACT_EVERYWHERE = ("configurations", "hashes")
# Goldens in which one different token changes all later numbers.
CHAOTIC = ("resume", "grpo", "demo_1", "demo_2", "demo_3")


def load(name: str) -> dict[str, Any]:
    return json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))


def differences(recorded: Any, now: Any, place: str, *, exact: bool) -> list[str]:
    """Return the paths of values that differ between `recorded` and `now`.

    New keys in objects are allowed. Hashes of exported files depend on every bit of the weights, so
    only an exact comparison includes hashes.
    """
    if isinstance(recorded, dict) and isinstance(now, dict):
        found = []
        for key, value in recorded.items():
            if key == "exported" and not exact:
                continue
            if key not in now:
                found.append(f"{place}/{key}: missing")
            else:
                found += differences(value, now[key], f"{place}/{key}", exact=exact)
        return found
    if isinstance(recorded, list) and isinstance(now, list):
        if len(recorded) != len(now):
            return [f"{place}: {len(recorded)} entries were recorded, now {len(now)}"]
        found = []
        for index, (before, after) in enumerate(zip(recorded, now, strict=True)):
            found += differences(before, after, f"{place}/{index}", exact=exact)
        return found
    if recorded == now:
        return []
    numeric = isinstance(recorded, int | float) and isinstance(now, int | float)
    if not exact and numeric and math.isclose(recorded, now, rel_tol=RELATIVE, abs_tol=ABSOLUTE):
        return []
    return [f"{place}: recorded as {recorded!r}, now {now!r}"]


def marked(name: str) -> Any:
    return (
        pytest.param(name, marks=[pytest.mark.verify, pytest.mark.timeout(2400)])
        if name in SLOW
        else name
    )


@pytest.mark.parametrize("name", [marked(name) for name in GOLDENS])
def test_command_reproduces_the_golden_numbers(name: str, tmp_path: Path) -> None:
    golden = load(name)
    same_machine = golden["machine"] == machine()
    if name in CHAOTIC and not same_machine:
        pytest.skip(
            f"recorded on a different machine, which rounds sums differently: {golden['machine']}"
        )
    exact = same_machine or name in EXACT_EVERYWHERE
    now = json.loads(json.dumps(GOLDENS[name](tmp_path)))
    assert differences(golden["value"], now, name, exact=exact) == []


def test_changed_value_counts_as_a_difference_but_an_added_value_does_not() -> None:
    recorded = {"numbers": [{"step": 1, "loss": 0.5}]}
    assert (
        differences(recorded, {"numbers": [{"step": 1, "loss": 0.5, "new": 1.0}]}, "", exact=True)
        == []
    )
    assert differences(recorded, {"numbers": [{"step": 1, "loss": 0.50001}]}, "", exact=False) == []


def test_hashes_of_exported_files_are_compared_only_in_an_exact_comparison() -> None:
    recorded, now = {"run": {"exported": {"a": "1"}}}, {"run": {"exported": {"a": "2"}}}
    assert differences(recorded, now, "", exact=False) == []
    assert len(differences(recorded, now, "", exact=True)) == 1
    assert differences(recorded, {"numbers": [{"step": 1, "loss": 0.50001}]}, "", exact=True) != []
    assert differences(recorded, {"numbers": [{"step": 1}]}, "", exact=False) != []
    assert differences(recorded, {"numbers": []}, "", exact=False) != []
