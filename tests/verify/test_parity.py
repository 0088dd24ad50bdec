"""Tests that every layout trains as one process does. docs/results/parity.md lists the errors."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from itertools import product
from pathlib import Path

import pytest
import torch

from tests.ranks import ROOT
from tests.trainers.parity import Case, Errors, compare, is_equal
from tests.verify.results import write_result

pytestmark = pytest.mark.verify
# Each row: number of ranks, ring size, tensor-parallel size.
LAYOUTS = (
    (2, 1, 1),
    (2, 2, 1),
    (2, 1, 2),
    (4, 4, 1),
    (4, 2, 1),
    (4, 1, 2),
    (4, 2, 2),
    (8, 2, 2),
)
MODELS = ("llama", "qwen3", "gemma3", "mistral-windowed", "mixtral", "qwen3-moe")
TASKS = ("dpo", "rm", "kto", "kd", "kd_top", "prm_hard", "prm_soft")
STAGES = (1, 2, 3)


def matrix() -> list[Case]:
    """Return all layouts and stages for every model, and other settings only for some models."""
    cases: list[Case] = []
    for model, (ranks, sp, tp), zero in product(MODELS, LAYOUTS, STAGES):
        cases.append(Case(model=model, ranks=ranks, sp=sp, tp=tp, zero=zero))
    for task, (ranks, sp, tp), zero in product(TASKS, LAYOUTS[1:], (2, 3)):
        cases.append(Case(model="llama", task=task, ranks=ranks, sp=sp, tp=tp, zero=zero))
    for model, (ranks, sp, tp), zero in product(("llama", "qwen3"), LAYOUTS[1:], STAGES):
        shape = {"ranks": ranks, "sp": sp, "tp": tp, "zero": zero}
        cases += [
            Case(model=model, lora=True, **shape),
            Case(model=model, lora=True, checkpointing=True, **shape),
            Case(model=model, checkpointing=True, **shape),
        ]
        if sp == 1:
            cases.append(Case(model=model, packed=False, **shape))
        if zero == 1:
            cases.append(Case(model=model, optim="adam", **shape))
    return cases


@pytest.mark.timeout(3600)
def test_every_layout_equals_one_process(tmp_path: Path) -> None:
    # This runs in its own process, because ranks must be forked before any thread is started.
    out = tmp_path / "errors.json"
    command = [sys.executable, "-m", "tests.verify.test_parity", str(tmp_path), str(out)]
    subprocess.run(command, cwd=ROOT, check=True)
    cases = matrix()
    compared: list[Errors | str] = []
    for found in json.loads(out.read_text()):
        compared.append(found if isinstance(found, str) else Errors(**found))
    write_page(cases, compared)
    for case, errors in zip(cases, compared, strict=True):
        if case.optim == "sgd":  # AdamW amplifies rounding to a few % of the learning rate
            assert is_equal(errors), (case, errors)


def write_page(cases: list[Case], compared: list[Errors | str]) -> None:
    """Write the page with each layout's and setting's worst errors over all ZeRO stages."""
    worst: dict[tuple[str, str], list[Errors | str]] = {}
    for case, errors in zip(cases, compared, strict=True):
        layout = case.layout.partition(" ZeRO")[0]
        worst.setdefault((case.settings, layout), []).append(errors)
    rows: list[tuple[str, ...]] = []
    for (settings, layout), found in worst.items():
        failures = [errors for errors in found if isinstance(errors, str)]
        if failures:
            rows.append((settings, layout, failures[0], "", ""))
            continue
        measured = [errors for errors in found if isinstance(errors, Errors)]
        rows.append(
            (
                settings,
                layout,
                f"{max(errors.loss for errors in measured):.1e}",
                f"{max(errors.gradient for errors in measured):.1e}",
                f"{max(errors.weights for errors in measured):.1e}",
            )
        )
    write_result(
        "parity",
        "Layouts of ranks compared with one process",
        "python -m pytest -m verify tests/verify/test_parity.py",
        ("model, task, settings", "layout", "loss", "gradient (relative)", "weights"),
        rows,
        "Three steps in float32, the worst of ZeRO 1 to 3: the largest difference of a loss, the "
        "relative difference of the first gradient, and the largest difference of a weight after "
        "the last step. Steps are plain gradient descent except where AdamW is named. DP: ranks "
        "that divide the data; TP: ranks that split layers; SP: ranks that share sequences.",
    )


def main() -> None:
    """Compare all cases, and write the errors to a file."""
    torch.set_num_threads(1)
    folder, out = map(Path, sys.argv[1:])
    cases = matrix()
    compared = compare(cases, folder)
    found = [compared[case] for case in cases]
    out.write_text(json.dumps([e if isinstance(e, str) else asdict(e) for e in found]))


if __name__ == "__main__":
    main()
