"""What a run says about itself: nothing if it is healthy, and one notice for each sickness."""

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

HEALTHY = Path(__file__).parent / "healthy"  # the watched numbers of the demo's runs
Row = dict[str, Any]


def recorded(name: str) -> list[Row]:
    return [json.loads(line) for line in (HEALTHY / f"{name}.jsonl").read_text().splitlines()]


def with_values(
    rows: list[Row], metric: str, value: Callable[[int, float], float | None], after: int = 10
) -> list[Row]:
    """The rows with the metric changed in the steps after one: `value(steps since then, as it
    was)`.
    """
    number = count(1)
    return [
        row | {metric: value(next(number), row[metric])}
        if metric in row and row["step"] > after
        else row
        for row in rows
    ]


@pytest.mark.parametrize("name", ["sft", "rm", "ppo", "grpo"])
def test_a_healthy_run_says_nothing(name: str) -> None:
    rows = recorded(name)
    assert len(rows) > 60
    assert notices_of(rows) == []


def test_the_runs_on_record_say_nothing_unless_they_got_worse() -> None:
    for record in map(json.loads, RECORDS.read_text().splitlines()):
        if record["name"] == UNCORRECTED:
            continue
        rows: list[Row] = [
            {"step": n, "train/reward": solved} for n, solved in enumerate(record["solved"], 1)
        ]
        ends = (0, record["pass_at_1"][0]), (len(rows), record["pass_at_1"][1])
        rows += [
            {"step": n, "eval/eval_sort_pass1": p, "eval/eval_sort_score_stderr": 0.015}
            for n, p in ends
        ]
        assert notices_of(rows) == [], record["name"]


SICKNESSES: list[tuple[str, str, str, Callable[[int, float], float | None]]] = [
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
    ("run", "sickness", "metric", "value"),
    SICKNESSES,
    ids=[f"{s}: {m}" for _, s, m, _ in SICKNESSES],
)
def test_each_sickness_is_told_once_by_its_own_notice(
    run: str, sickness: str, metric: str, value: Callable[[int, float], float | None]
) -> None:
    (notice,) = notices_of(with_values(recorded(run), metric, value))
    assert re.match(r"Steps? \d+( to \d+)?: ", notice)
    assert metric in notice
    assert notice.endswith(MEANING[sickness])


@pytest.mark.parametrize(
    ("sickness", "curve"),
    [
        ("entropy collapse", [1.0, 0.5, *[0.005] * 5]),
        ("entropy growth", [1.0, 2.0, *[3.5] * 5]),
        (None, [1.0, 0.5, 0.2, 0.05, 0.05, 0.05, 0.05, 0.05]),
        (None, [0.1, 0.2, 0.5, 0.9, 0.9, 0.9, 0.9, 0.9]),
    ],
)
def test_the_entropy_may_fall_and_rise_but_not_vanish_or_run_away(
    sickness: str | None, curve: list[float]
) -> None:
    found = notices_of({"step": n, "train/entropy_loss": x} for n, x in enumerate(curve))
    assert [notice.endswith(MEANING[sickness]) for notice in found if sickness] == [True] * (
        sickness is not None
    )
    assert len(found) == (sickness is not None)


@pytest.mark.parametrize(
    ("losses", "told"),
    [
        ([0.5, 0.4, 0.45, 0.5], True),
        ([0.5, 0.4, 0.45, 0.44], False),
        ([0.5, 0.4, 0.401, 0.402], False),
    ],
)
def test_an_evaluation_loss_that_keeps_rising_is_overfitting(
    losses: list[float], told: bool
) -> None:
    found = notices_of({"step": n, "eval/eval_loss": x} for n, x in enumerate(losses))
    assert [notice.endswith(MEANING["overfitting"]) for notice in found] == [True] * told


def evaluations(*scores: float, error: float = 0.02) -> list[Row]:
    return [
        {"step": n, "eval/eval_x_pass1": s, "eval/eval_x_score_stderr": error}
        for n, s in enumerate(scores)
    ]


def told_when(rows: list[Row]) -> str:
    """Whether a notice comes while the run goes on, at its end, or never."""
    health = Health()
    running, ended = health.read(rows), health.end()
    assert len(running + ended) <= 1
    return "running" if running else "end" if ended else "never"


def test_a_held_out_score_may_dip_once_but_not_end_below_its_start() -> None:
    assert told_when(evaluations(0.5, 0.4, 0.5, 0.6)) == "never"
    assert told_when(evaluations(0.5, 0.4, 0.4, 0.6)) == "running"
    assert told_when(evaluations(0.5, 0.6, 0.4)) == "end"
    assert (
        told_when(evaluations(0.5, 0.46)) == "never"
    )  # within two standard errors of the difference, 0.057
    assert told_when(evaluations(0.5, 0.44)) == "end"
    assert (
        told_when([{"step": n, "eval/eval_x_pass1": x} for n, x in enumerate([0.5, 0.1])])
        == "never"
    )  # no error


@pytest.mark.parametrize(
    ("steps", "accuracy", "told"), [(40, 0.5, "end"), (40, 0.56, "never"), (20, 0.5, "never")]
)
def test_a_reward_model_at_chance_says_so_at_its_end(
    steps: int, accuracy: float, told: str
) -> None:
    assert (
        told_when([{"step": n, "train/acc": accuracy + 0.1 * (-1) ** n} for n in range(steps)])
        == told
    )


def test_a_run_whose_steps_all_had_a_learning_rate_of_zero_says_so_but_not_if_it_ends_after_the_first_of_a_warm_up() -> (
    None
):
    assert told_when([{"step": 1, "train/lr": 0.0}]) == "never"
    assert told_when([{"step": n, "train/lr": 0.0} for n in range(2)]) == "end"
    assert (
        told_when([{"step": n, "train/lr": rate} for n, rate in enumerate([0.0, 1e-5])]) == "never"
    )
    assert (
        told_when([{"step": n, "train/lr": rate} for n, rate in enumerate([1e-5, 0.0])]) == "never"
    )


@pytest.mark.parametrize(
    ("kept", "told"),
    [
        ([0], "end"),
        ([0, 0, 0], "end"),
        ([0, 0, 8], "never"),
        ([8, 0, 0], "never"),
        ([8] + [0] * 5, "running"),
    ],
)
def test_steps_without_an_episode_to_train_on_are_noticed(kept: list[int], told: str) -> None:
    assert (
        told_when([{"step": n, "rollout/num_samples": float(x)} for n, x in enumerate(kept)])
        == told
    )


@pytest.mark.parametrize(("last", "told"), [(-20.0, "running"), (-4.0, "never"), (10.0, "never")])
def test_chosen_answers_that_become_less_likely_are_noticed(last: float, told: str) -> None:
    rows = [
        {"step": n, "train/chosen_logratio": last * n / 20, "train/acc": 0.9} for n in range(21)
    ]
    assert told_when(rows) == told


def test_equal_rewards_explain_a_gradient_of_zero() -> None:
    rows = [
        {"step": n, "train/dead_groups": 1.0, "train/reward": 0.0, "train/actor_grad_norm": 0.0}
        for n in range(9)
    ]
    (notice,) = notices_of(rows)
    assert notice.endswith(MEANING["same rewards"])
    assert CAUSES == {"no update": "same rewards", "rounded away": "no update"}


def test_bfloat16_weights_that_hardly_change_are_reported_unless_nothing_is_learned() -> None:
    still = [
        {"step": n, "train/actor_changed_weights": 0.0002, "train/actor_lr": 1e-6} for n in range(9)
    ]
    (notice,) = notices_of(still)
    assert notice.endswith(MEANING["rounded away"]) and "0.0002" in notice
    assert notices_of([row | {"train/actor_changed_weights": 0.01} for row in still]) == []
    (notice,) = notices_of([row | {"train/dead_groups": 1.0, "train/reward": 0.0} for row in still])
    assert notice.endswith(MEANING["same rewards"])


def test_a_warm_up_from_zero_is_healthy() -> None:
    assert (
        notices_of(
            {"step": n, "train/actor_lr": rate} for n, rate in enumerate([0, 0, 0, 0, 1e-6, 2e-6])
        )
        == []
    )


def test_a_notice_has_the_steps_the_number_and_where_it_began() -> None:
    (notice,) = notices_of(
        {"step": n, "train/logprob_gap_mean": x}
        for n, x in enumerate([0.05, 0.08, 0.15, 0.2, 0.25])
    )
    assert notice.startswith(
        "Steps 2 to 4: train/logprob_gap_mean is 0.25 (at the start 0.05). Engine and trainer"
    )


def test_every_flag_that_a_notice_names_exists_and_every_sickness_has_a_rule() -> None:
    known = {flag for root in ROOTS.values() for flag in flags_of(root)}
    named = {flag for text in MEANING.values() for flag in re.findall(r"--([\w.]+\w)", text)}
    assert named - known == set()
    assert named & set(flags_of(PPOConfig)) and named & set(flags_of(SFTConfig))
    assert {rule.sickness for rule in RULES} == set(MEANING)
