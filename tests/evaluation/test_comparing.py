"""Pairs of answers: construction, wins by reward, win rate, accuracy, and failures."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from openrlhf.config.rollout import RewardConfig
from openrlhf.evaluation.comparing import (
    Comparison,
    accuracy_columns,
    by_reward,
    metrics_of,
    pair_up,
    reward_metrics,
    row_of,
    win_columns,
    win_rate,
)
from openrlhf.observability.glossary import find_spec
from openrlhf.rewards.budget import ErrorBudget, RewardErrors
from tests.trainers.episodes import episode, failed


def won(index: int, win: float | None, *, source: str = "default") -> Comparison:
    """Return a judged pair for the prompt with the given index."""
    answer = episode(index, source=source)
    return Comparison(
        ours=answer, theirs=answer, win=win, error=None if win is not None else "no verdict"
    )


def rewarded(index: int, ours: float, theirs: float, *, source: str = "default") -> Comparison:
    pair = Comparison(
        ours=episode(index, score=ours, source=source),
        theirs=episode(index, score=theirs, source=source),
    )
    return replace(pair, win=by_reward(pair))


# ---- pairs


def test_answers_to_a_prompt_are_paired_by_index() -> None:
    ours = [episode(prompt, sample) for prompt in (0, 1) for sample in (0, 1)]
    theirs = [episode(prompt, sample, score=1.0) for prompt in (1, 0) for sample in (0, 1)]
    numbers = [
        (p.ours.prompt.index, p.ours.sample_index, p.theirs.prompt.index, p.theirs.sample_index)
        for p in pair_up(ours, theirs)
    ]
    assert numbers == [(0, 0, 0, 0), (0, 1, 0, 1), (1, 0, 1, 0), (1, 1, 1, 1)]


def test_single_answer_of_the_opponent_is_paired_with_each_of_our_answers() -> None:
    pairs = pair_up([episode(0, sample) for sample in range(3)], [episode(0, text="written")])
    assert [pair.theirs.prompt.text for pair in pairs] == ["written"] * 3


def test_pair_has_the_error_of_its_failed_answer() -> None:
    pairs = pair_up([episode(0, score=1.0), failed(1)], [failed(0), episode(1, score=1.0)])
    assert [(pair.error, by_reward(pair)) for pair in pairs] == [("it broke", None)] * 2


@pytest.mark.parametrize(
    ("ours", "theirs", "win"), [(1.0, 0.5, 1.0), (0.5, 1.0, 0.0), (0.5, 0.5, 0.5)]
)
def test_larger_reward_wins_and_equal_rewards_are_a_tie(
    ours: float, theirs: float, win: float
) -> None:
    assert rewarded(0, ours, theirs).win == win


# ---- the win rate


def test_win_rate_counts_ties_as_one_half() -> None:
    assert win_rate([won(0, 1.0), won(1, 0.5), won(2, 0.0), won(3, 0.5)])[0] == 0.5


def test_win_rate_weights_prompts_equally() -> None:
    """Prompt 0 has four wins and prompt 1 has one loss. The mean over pairs would be 0.8."""
    pairs = [*[won(0, 1.0)] * 4, won(1, 0.0), won(1, None)]
    assert win_rate(pairs)[0] == 0.5


def test_standard_error_of_the_win_rate_is_computed_over_prompts() -> None:
    """The means 1, 0.5 and 0 have an unbiased standard deviation of 0.5, which is divided by √3."""
    pairs = [won(0, 1.0), won(0, 1.0), won(1, 1.0), won(1, 0.0), won(2, 0.0), won(2, 0.0)]
    assert win_rate(pairs) == (0.5, pytest.approx(0.5 / math.sqrt(3)))


def test_more_samples_per_prompt_do_not_reduce_the_standard_error() -> None:
    pairs = [won(0, 1.0), won(1, 0.0), won(2, 1.0)]
    assert win_rate(pairs * 10) == win_rate(pairs)


def test_win_rate_is_nan_without_pairs_and_its_standard_error_is_nan_for_one_prompt() -> None:
    assert win_rate([won(0, 1.0)])[0] == 1.0
    assert math.isnan(win_rate([won(0, 1.0)])[1])
    assert all(map(math.isnan, win_rate([won(0, None)])))


def test_win_metrics_are_logged_overall_and_per_data_source() -> None:
    pairs = [
        won(0, 1.0, source="x"),
        won(1, 0.5, source="x"),
        won(2, 0.0, source="y"),
        won(3, None, source="y"),
    ]
    metrics = metrics_of(pairs, win_columns)
    counts = {name: metrics[f"eval/{name}"] for name in ("wins", "ties", "losses", "failed_pairs")}
    assert counts == {"wins": 1.0, "ties": 1.0, "losses": 1.0, "failed_pairs": 1.0}
    assert (
        metrics["eval/win_rate"],
        metrics["eval/eval_x_win_rate"],
        metrics["eval/eval_y_win_rate"],
    ) == (
        0.5,
        0.75,
        0.0,
    )
    assert all(find_spec(name) for name in metrics)
    assert win_columns(pairs[:2]) == {
        "wins": 1, "ties": 1, "losses": 0, "failed_pairs": 0, "win_rate": 0.75,
        "win_rate_stderr": 0.25
    }  # fmt: skip


def test_nan_metrics_are_not_logged() -> None:
    assert {name for name in metrics_of([won(0, None)], win_columns) if "win_rate" in name} == set()
    metrics = metrics_of([won(0, 1.0, source="x"), won(1, 0.5, source="y")], win_columns)
    assert {name for name in metrics if "eval_x_win_rate" in name} == {"eval/eval_x_win_rate"}
    assert "eval/win_rate_stderr" in metrics


# ---- accuracy


def test_accuracy_counts_pairs_in_which_the_chosen_reward_is_strictly_larger() -> None:
    pairs = [
        rewarded(0, 2.0, 1.0, source="x"),
        rewarded(1, 1.0, 1.0, source="x"),
        rewarded(2, 0.0, 3.0, source="y"),
    ]
    metrics = metrics_of(pairs, accuracy_columns) | reward_metrics(pairs)
    assert metrics == {
        "eval/acc_mean": pytest.approx(1 / 3),
        "eval/margin_mean": pytest.approx(-2 / 3),
        "eval/reward_mean": pytest.approx(8 / 6),
        "eval/reward_std": pytest.approx(
            math.sqrt(sum((r - 8 / 6) ** 2 for r in (2, 1, 1, 1, 0, 3)) / 5)
        ),
        "eval/failed_pairs": 0.0,
        "eval/eval_x_acc_mean": 0.5,
        "eval/eval_x_margin_mean": 0.5,
        "eval/eval_y_acc_mean": 0.0,
        "eval/eval_y_margin_mean": -3.0,
    }
    assert all(find_spec(name) for name in metrics)
    assert accuracy_columns(pairs[:2]) == {"acc_mean": 0.5, "margin_mean": 0.5, "failed_pairs": 0}


# ---- failures


def test_too_many_failed_pairs_raise_the_first_error() -> None:
    failed = {"errors": ["no verdict", "gone"], "of": 4, "what": "pairs could not be judged"}
    ErrorBudget(RewardConfig(max_error_rate=0.5)).check_errors(**failed)
    ErrorBudget(RewardConfig(max_error_rate=1.0)).check_errors(**failed)
    with pytest.raises(
        RewardErrors, match=r"2 of 4 .*--reward\.max_error_rate 0\.4.*\n.*no verdict"
    ):
        ErrorBudget(RewardConfig(max_error_rate=0.4)).check_errors(**failed)


def test_row_of_a_pair_in_the_samples_file_contains_both_answers() -> None:
    pair = rewarded(3, 1.0, 0.5)
    theirs = replace(pair.theirs, response_text="other")
    row = row_of(replace(pair, theirs=theirs))
    shown = [row[key] for key in ("prompt_index", "reward", "against", "against_reward", "win")]
    assert shown == [3, 1.0, "other", 0.5, 1.0]
    assert row_of(won(0, None))["error"] == "no verdict"
