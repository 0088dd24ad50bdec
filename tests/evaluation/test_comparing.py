"""Pairs of answers: who meets whom, what counts as a win, and what the numbers mean."""

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
    """A pair of prompt number `index`."""
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


def test_answers_of_one_number_to_one_prompt_meet() -> None:
    ours = [episode(prompt, sample) for prompt in (0, 1) for sample in (0, 1)]
    theirs = [episode(prompt, sample, score=1.0) for prompt in (1, 0) for sample in (0, 1)]
    met = [
        (p.ours.prompt.index, p.ours.sample_index, p.theirs.prompt.index, p.theirs.sample_index)
        for p in pair_up(ours, theirs)
    ]
    assert met == [(0, 0, 0, 0), (0, 1, 0, 1), (1, 0, 1, 0), (1, 1, 1, 1)]


def test_a_single_other_answer_meets_all_of_ours() -> None:
    pairs = pair_up([episode(0, sample) for sample in range(3)], [episode(0, text="written")])
    assert [pair.theirs.prompt.text for pair in pairs] == ["written"] * 3


def test_a_pair_fails_with_either_answer() -> None:
    pairs = pair_up([episode(0, score=1.0), failed(1)], [failed(0), episode(1, score=1.0)])
    assert [(pair.error, by_reward(pair)) for pair in pairs] == [("it broke", None)] * 2


@pytest.mark.parametrize(
    ("ours", "theirs", "win"), [(1.0, 0.5, 1.0), (0.5, 1.0, 0.0), (0.5, 0.5, 0.5)]
)
def test_the_larger_reward_wins_and_equal_ones_tie(ours: float, theirs: float, win: float) -> None:
    assert rewarded(0, ours, theirs).win == win


# ---- the win rate


def test_ties_count_one_half() -> None:
    assert win_rate([won(0, 1.0), won(1, 0.5), won(2, 0.0), won(3, 0.5)])[0] == 0.5


def test_prompts_count_alike_however_many_of_their_pairs_could_be_judged() -> None:
    """Prompt 0: 1, 1, 1, 1; prompt 1: 0. Over pairs it would be 0.8."""
    pairs = [*[won(0, 1.0)] * 4, won(1, 0.0), won(1, None)]
    assert win_rate(pairs)[0] == 0.5


def test_the_standard_error_is_that_of_the_prompts_means() -> None:
    """Means 1, 0.5, 0: deviation 0.5 with the unbiased variance, over the root of 3."""
    pairs = [won(0, 1.0), won(0, 1.0), won(1, 1.0), won(1, 0.0), won(2, 0.0), won(2, 0.0)]
    assert win_rate(pairs) == (0.5, pytest.approx(0.5 / math.sqrt(3)))


def test_more_samples_of_the_same_prompts_do_not_shrink_the_error() -> None:
    pairs = [won(0, 1.0), won(1, 0.0), won(2, 1.0)]
    assert win_rate(pairs * 10) == win_rate(pairs)


def test_one_prompt_has_no_standard_error_and_none_no_rate() -> None:
    assert win_rate([won(0, 1.0)])[0] == 1.0
    assert math.isnan(win_rate([won(0, 1.0)])[1])
    assert all(map(math.isnan, win_rate([won(0, None)])))


def test_wins_are_logged_in_all_and_per_data_source() -> None:
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
        "wins": 1, "ties": 1, "losses": 0, "failed_pairs": 0, "win_rate": 0.75, "win_rate_stderr": 0.25
    }  # fmt: skip


def test_a_rate_of_nothing_and_an_error_of_one_prompt_are_not_logged() -> None:
    assert {name for name in metrics_of([won(0, None)], win_columns) if "win_rate" in name} == set()
    metrics = metrics_of([won(0, 1.0, source="x"), won(1, 0.5, source="y")], win_columns)
    assert {name for name in metrics if "eval_x_win_rate" in name} == {"eval/eval_x_win_rate"}
    assert "eval/win_rate_stderr" in metrics


# ---- accuracy


def test_accuracy_counts_pairs_whose_chosen_text_has_strictly_more() -> None:
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


def test_too_many_failed_pairs_are_an_error_with_the_first_of_them() -> None:
    failed = {"errors": ["no verdict", "gone"], "of": 4, "what": "pairs could not be judged"}
    ErrorBudget(RewardConfig(max_error_rate=0.5)).check_errors(**failed)
    ErrorBudget(RewardConfig(max_error_rate=1.0)).check_errors(**failed)
    with pytest.raises(
        RewardErrors, match=r"2 of 4 pairs .*--reward\.max_error_rate 0\.4.*\n.*no verdict"
    ):
        ErrorBudget(RewardConfig(max_error_rate=0.4)).check_errors(**failed)


def test_a_pair_is_a_line_of_samples_with_both_answers() -> None:
    pair = rewarded(3, 1.0, 0.5)
    theirs = replace(pair.theirs, response_text="other")
    row = row_of(replace(pair, theirs=theirs))
    shown = [row[key] for key in ("prompt_index", "reward", "against", "against_reward", "win")]
    assert shown == [3, 1.0, "other", 0.5, 1.0]
    assert row_of(won(0, None))["error"] == "no verdict"
