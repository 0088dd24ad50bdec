"""Notices about a run: none for a healthy run, and one for each problem."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from openrlhf.config.flags import flags_of
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.supervised import SFTConfig
from openrlhf.observability.health import CAUSES, MEANING, RULES, Health, notices_of
from tests.config.commands import ROOTS
from tests.verify.learning import RECORDS, UNCORRECTED

HEALTHY = Path(__file__).parent / "healthy"  # demo-run metrics that rules check
Row = dict[str, Any]


def recorded(name: str) -> list[Row]:
    return [json.loads(line) for line in (HEALTHY / f"{name}.jsonl").read_text().splitlines()]


def with_values(
    rows: list[Row], metric: str, value: Callable[[int, float], float | None], after: int = 10
) -> list[Row]:
    """Replace the metric's value with `value(n, old)` in the n-th row after step `after`."""
    number = count(1)
    return [
        row | {metric: value(next(number), row[metric])}
        if metric in row and row["step"] > after
        else row
        for row in rows
    ]


@pytest.mark.parametrize("name", ["sft", "rm", "ppo", "grpo"])
def test_healthy_run_has_no_notices(name: str) -> None:
    rows = recorded(name)
    assert len(rows) > 60
    assert notices_of(rows) == []


def test_recorded_learning_runs_have_no_notices() -> None:
    for record in map(json.loads, RECORDS.read_text().splitlines()):
        if record["name"] == UNCORRECTED:
            continue
        rows: list[Row] = [
            {"step": n, "train/reward": solved} for n, solved in enumerate(record["solved"], 1)
        ]
        for step, score in zip((0, len(rows)), record["pass_at_1"], strict=True):
            rows.append(
                {"step": step, "eval/eval_sort_pass1": score, "eval/eval_sort_score_stderr": 0.015}
            )
        assert notices_of(rows) == [], record["name"]


PROBLEMS: list[tuple[str, str, str, Callable[[int, float], float | None]]] = [
    ("grpo", "same rewards", "train/dead_groups", lambda n, _: 1.0),
    ("ppo", "same rewards", "train/reward", lambda n, _: 0.25),
    ("grpo", "no update", "train/actor_grad_norm", lambda n, _: 0.0),
    ("ppo", "no update", "train/critic_lr", lambda n, _: 0.0),
    ("sft", "no update", "train/grad_norm", lambda n, _: 0.0),
    ("sft", "no update", "train/gpt_loss", lambda n, _: 2.5),
    ("rm", "no update", "train/loss", lambda n, _: 0.6931472),
    ("grpo", "not finite", "train/nonfinite_steps", lambda n, _: float(n)),
    ("sft", "not finite", "train/gpt_loss", lambda n, x: None if n == 3 else x),
    ("ppo", "not finite", "train/critic_loss", lambda n, x: None if n == 3 else x),
    ("grpo", "drift", "train/kl", lambda n, x: 0.1 * n),
    ("grpo", "leap", "train/kl", lambda n, x: x + 0.2),
    ("grpo", "truncation", "train/truncated", lambda n, _: 0.99),
    ("grpo", "mismatch", "train/logprob_gap_mean", lambda n, _: 0.02 * n),
    ("grpo", "mismatch", "train/rollout_ratio", lambda n, _: 0.5),
    ("grpo", "empty responses", "train/response_length", lambda n, _: 1.0),
    ("ppo", "regression", "eval/eval_sort_pass1", lambda n, _: 0.2),
    ("sft", "divergence", "train/gpt_loss", lambda n, x: x + n),
    ("rm", "divergence", "train/loss", lambda n, x: x + 0.1 * n),
]


@pytest.mark.parametrize(
    ("run", "problem", "metric", "value"),
    PROBLEMS,
    ids=[f"{problem}: {metric}" for _, problem, metric, _ in PROBLEMS],
)
def test_each_problem_is_reported_once_with_its_metric_and_meaning(
    run: str, problem: str, metric: str, value: Callable[[int, float], float | None]
) -> None:
    (notice,) = notices_of(with_values(recorded(run), metric, value))
    assert re.match(r"Steps? \d+( to \d+)?: ", notice)
    assert metric in notice
    assert notice.endswith(MEANING[problem])


@pytest.mark.parametrize(
    ("problem", "curve"),
    [
        ("entropy collapse", [1.0, 0.5, *[0.005] * 5]),
        ("entropy growth", [1.0, 2.0, *[3.5] * 5]),
        (None, [1.0, 0.5, 0.2, 0.05, 0.05, 0.05, 0.05, 0.05]),
        (None, [0.1, 0.2, 0.5, 0.9, 0.9, 0.9, 0.9, 0.9]),
    ],
)
def test_entropy_is_reported_only_if_it_collapses_or_grows_without_bound(
    problem: str | None, curve: list[float]
) -> None:
    found = notices_of({"step": n, "train/entropy_loss": x} for n, x in enumerate(curve))
    if problem is None:
        assert found == []
    else:
        (notice,) = found
        assert notice.endswith(MEANING[problem])


@pytest.mark.parametrize(
    ("losses", "reported"),
    [
        ([0.5, 0.4, 0.45, 0.5], True),
        ([0.5, 0.4, 0.45, 0.44], False),
        ([0.5, 0.4, 0.401, 0.402], False),
    ],
)
def test_overfitting_is_reported_if_evaluation_loss_keeps_rising(
    losses: list[float], reported: bool
) -> None:
    found = notices_of({"step": n, "eval/eval_loss": x} for n, x in enumerate(losses))
    assert [notice.endswith(MEANING["overfitting"]) for notice in found] == [True] * reported


def evaluations(*scores: float, error: float = 0.02) -> list[Row]:
    return [
        {"step": n, "eval/eval_x_pass1": s, "eval/eval_x_score_stderr": error}
        for n, s in enumerate(scores)
    ]


def reported_when(rows: list[Row]) -> str:
    """Return when the single expected notice is printed: during the run, at the end, or never."""
    health = Health()
    running = health.read(rows)
    ended = health.end()
    assert len(running + ended) <= 1
    if running:
        return "running"
    if ended:
        return "end"
    return "never"


def test_regression_is_reported_if_the_score_stays_or_ends_below_its_first_value() -> None:
    assert reported_when(evaluations(0.5, 0.4, 0.5, 0.6)) == "never"
    assert reported_when(evaluations(0.5, 0.4, 0.4, 0.6)) == "running"
    assert reported_when(evaluations(0.5, 0.6, 0.4)) == "end"
    # The change is within two standard errors of the difference, 0.057.
    assert reported_when(evaluations(0.5, 0.46)) == "never"
    assert reported_when(evaluations(0.5, 0.44)) == "end"
    without_error = [{"step": n, "eval/eval_x_pass1": x} for n, x in enumerate([0.5, 0.1])]
    assert reported_when(without_error) == "never"


@pytest.mark.parametrize(
    ("steps", "accuracy", "reported"), [(40, 0.5, "end"), (40, 0.56, "never"), (20, 0.5, "never")]
)
def test_chance_accuracy_is_reported_at_end_of_long_run(
    steps: int, accuracy: float, reported: str
) -> None:
    assert (
        reported_when([{"step": n, "train/acc": accuracy + 0.1 * (-1) ** n} for n in range(steps)])
        == reported
    )


@pytest.mark.parametrize(
    ("steps", "share", "reported"),
    [(2, 0.9, "end"), (5, 0.9, "running"), (2, 0.85, "never"), (8, 0.85, "never")],
)
def test_truncation_of_90_percent_is_reported_even_in_short_runs(
    steps: int, share: float, reported: str
) -> None:
    rows = [{"step": n, "train/truncated": share} for n in range(steps)]
    assert reported_when(rows) == reported


def test_zero_learning_rate_is_reported_unless_run_ends_after_first_step() -> None:
    assert reported_when([{"step": 1, "train/lr": 0.0}]) == "never"
    assert reported_when([{"step": n, "train/lr": 0.0} for n in range(2)]) == "end"
    assert (
        reported_when([{"step": n, "train/lr": rate} for n, rate in enumerate([0.0, 1e-5])])
        == "never"
    )
    assert (
        reported_when([{"step": n, "train/lr": rate} for n, rate in enumerate([1e-5, 0.0])])
        == "never"
    )


@pytest.mark.parametrize(
    ("kept", "reported"),
    [
        ([0], "end"),
        ([0, 0, 0], "end"),
        ([0, 0, 8], "never"),
        ([8, 0, 0], "never"),
        ([8] + [0] * 5, "running"),
    ],
)
def test_steps_in_which_no_episode_is_kept_are_reported(kept: list[int], reported: str) -> None:
    assert (
        reported_when([{"step": n, "rollout/num_samples": float(x)} for n, x in enumerate(kept)])
        == reported
    )


@pytest.mark.parametrize(
    ("last", "reported"), [(-20.0, "running"), (-4.0, "never"), (10.0, "never")]
)
def test_drop_in_likelihood_of_chosen_answers_is_reported(last: float, reported: str) -> None:
    rows = [
        {"step": n, "train/chosen_logratio": last * n / 20, "train/acc": 0.9} for n in range(21)
    ]
    assert reported_when(rows) == reported


def test_zero_gradient_explained_by_identical_rewards_is_not_reported() -> None:
    rows = [
        {"step": n, "train/dead_groups": 1.0, "train/reward": 0.0, "train/actor_grad_norm": 0.0}
        for n in range(9)
    ]
    (notice,) = notices_of(rows)
    assert notice.endswith(MEANING["same rewards"])
    assert CAUSES == {"no update": "same rewards", "rounded away": "no update"}


def test_unchanged_bfloat16_weights_are_reported_unless_rewards_are_identical() -> None:
    still = [
        {"step": n, "train/actor_changed_weights": 0.0002, "train/actor_lr": 1e-6} for n in range(9)
    ]
    (notice,) = notices_of(still)
    assert notice.endswith(MEANING["rounded away"]) and "0.0002" in notice
    assert notices_of([row | {"train/actor_changed_weights": 0.01} for row in still]) == []
    (notice,) = notices_of([row | {"train/dead_groups": 1.0, "train/reward": 0.0} for row in still])
    assert notice.endswith(MEANING["same rewards"])


def test_warm_up_from_zero_gives_no_notice() -> None:
    assert (
        notices_of(
            {"step": n, "train/actor_lr": rate} for n, rate in enumerate([0, 0, 0, 0, 1e-6, 2e-6])
        )
        == []
    )


def test_notice_contains_steps_value_and_initial_value() -> None:
    (notice,) = notices_of(
        {"step": n, "train/logprob_gap_mean": x}
        for n, x in enumerate([0.05, 0.08, 0.15, 0.2, 0.25])
    )
    assert notice.startswith("Steps 2 to 4: train/logprob_gap_mean is 0.25 (at the start 0.05). ")


def test_flags_in_explanations_exist_and_every_problem_has_a_rule() -> None:
    known = {flag for root in ROOTS.values() for flag in flags_of(root)}
    named = set(re.findall(r"--([\w.]+\w)", " ".join(MEANING.values())))
    assert named - known == set()
    assert named & set(flags_of(PPOConfig)) and named & set(flags_of(SFTConfig))
    assert {rule.problem for rule in RULES} == set(MEANING)


def test_notice_about_a_mismatch_names_the_flags_that_make_a_correction_biased() -> None:
    [notice] = notices_of({"step": n, "train/logprob_gap_mean": 0.5} for n in range(3))
    for flag in ("--rollout.top_p", "--rollout.top_k", "--algo.advantage.is_correction_level"):
        assert flag in notice
