"""Tests for the second copy of the weights that --ds.zpg keeps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from tests.training.optimizer_worker import Case, run_all

pytestmark = [pytest.mark.verify, pytest.mark.timeout(1200)]


def difference(one: list[dict[str, Tensor]], other: list[dict[str, Tensor]]) -> float:
    """Return the largest difference between the weights of two runs after any step.

    The runs' averaged weights are compared too.
    """
    gaps: list[float] = []
    for mine, theirs in zip(one, other, strict=True):
        gaps += [float((mine[name] - weight).abs().max()) for name, weight in theirs.items()]
    return max(gaps)


def test_second_copy_of_the_weights_does_not_change_results(tmp_path: Path) -> None:
    plain = [
        Case(ranks=4, zero=3, optim="adam"),
        Case(ranks=4, zero=3, optim="adam", lora=4),
        Case(ranks=4, zero=3, optim="adam", sp=2),
        Case(ranks=4, zero=3, optim="adam", dtype="bf16", resume_at=1),
    ]
    copied = [replace(case, zpg=2) for case in plain]
    results = run_all([*plain, *copied], tmp_path)
    for case, other in zip(plain, copied, strict=True):
        assert difference(results[case], results[other]) == 0, case
