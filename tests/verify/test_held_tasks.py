"""Tests that minimal commands do not make a model worse.

PPO and GRPO train on three tasks, in both precisions, with three seeds. To run a single chain:
`pytest -m verify tests/verify/test_held_tasks.py -k "adding and bf16 and seed1"`.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.verify.held_tasks import DTYPES, TASKS, Chain, Outcome, run_chain
from tests.verify.results import FOLDER, versions, write_result

RECORDS = FOLDER / "held_tasks.jsonl"


def record(chain: Chain) -> None:
    """Record a chain, replace any chain of that task, precision and seed, and write the page."""
    lines = RECORDS.read_text(encoding="utf-8").splitlines() if RECORDS.exists() else []
    kept = {(row["task"], row["dtype"], row["seed"]): row for row in map(json.loads, lines)}
    kept[chain.task, chain.dtype, chain.seed] = asdict(chain) | {"versions": versions()}
    rows = [row for _, row in sorted(kept.items())]
    RECORDS.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    write_result(
        "held_tasks",
        "Tasks that no default was chosen for",
        "python -m pytest -m verify tests/verify/test_held_tasks.py",
        [
            "task",
            "precision",
            "seed",
            "pairs right",
            "SFT pass@1",
            "PPO pass@1",
            "change",
            "GRPO pass@1",
            "change",
        ],
        [
            [row["task"], row["dtype"], row["seed"], f"{row['pairs_right']:.2f}", level(row["sft"])]
            + [
                cell
                for method in ("ppo", "grpo")
                for cell in (level(row[method]), change(row[method]))
            ]
            for row in rows
        ],
        "pass@1: mean over 400 held-out problems × 4 samples at temperature 1, ± its standard "
        "error over problems. Change: difference from the SFT model on the same problems. The "
        "commands in `tests/verify/held_tasks.py` omit every flag whose default works for them. "
        "Chains that have not been run yet have no row.",
    )


def level(outcome: dict[str, float]) -> str:
    return f"{outcome['pass_at_1']:.3f} ± {outcome['error']:.3f}"


def change(outcome: dict[str, float]) -> str:
    return f"{outcome['change']:+.3f} ± {outcome['change_error']:.3f}"


def test_outcome_compares_each_problem_before_and_after_training() -> None:
    before, after = [0.0, 0.5, 1.0, 0.5], [0.0, 0.25, 1.0, 0.25]
    outcome = Outcome.of(after, before)
    assert outcome.change == -0.125
    assert outcome.change_error == pytest.approx((4 * 0.125**2 / 3) ** 0.5 / 2)
    assert not outcome.got_worse  # pass@1 fell by only 1.7 standard errors
    assert Outcome.of([each - 0.25 for each in before[:-1]] + [0.0], before).got_worse


@pytest.mark.verify
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [1, 2, 3], ids="seed{}".format)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("task", TASKS)
def test_reinforcement_learning_does_not_make_the_model_worse(
    task: str, dtype: str, seed: int, tmp_path: Path
) -> None:
    chain = run_chain(tmp_path, task, dtype, seed)
    record(chain)
    assert not chain.ppo.got_worse, chain
    assert not chain.grpo.got_worse, chain
