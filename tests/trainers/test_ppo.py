"""What the loop keeps of a batch, what it measures of it, and which evaluation is the best."""

from __future__ import annotations

import math

import pytest

from openrlhf.observability.metrics import values
from openrlhf.trainers.ppo import BestMetric, rollout_metrics, trainable
from openrlhf.trajectory import StopReason
from tests.trainers.episodes import episode, failed

# ---- what can be trained on


def test_failed_episodes_are_not_trained_on() -> None:
    good = episode(0, 0, score=1.0)
    assert trainable([good, failed(0, 1)], needs_groups=False) == [good]


def test_episodes_without_a_sampled_token_are_not_trained_on() -> None:
    good = episode(0, 0, score=1.0)
    assert trainable([good, episode(0, 1, score=0.0, actions=0)], needs_groups=False) == [good]


def test_a_sample_that_lost_its_peers_teaches_nothing_where_samples_are_compared() -> None:
    pair = [episode(0, 0, score=1.0), episode(0, 1, score=0.0)]
    lone = [episode(1, 0, score=1.0), failed(1, 1)]
    assert trainable([*pair, *lone], needs_groups=True) == pair
    assert trainable([*pair, *lone], needs_groups=False) == [*pair, lone[0]]


# ---- metrics of the rollout


def test_the_metrics_of_a_rollout_by_hand() -> None:
    kept = [
        episode(0, 0, score=1.0, actions=2),
        episode(0, 1, score=0.0, actions=4, stop=StopReason.LENGTH),
        episode(1, 0, score=2.0, actions=3),
    ]
    assert values(rollout_metrics([*kept, failed(1, 1)], kept)) == pytest.approx(
        {
            "rollout/reward_mean": 1.0,
            "rollout/reward_std": 1.0,
            "rollout/response_length_mean": 3.0,
            "rollout/truncated_rate": 1 / 3,
            "rollout/num_samples": 3.0,
            "train/score": 1.0,
            "train/failed_episodes": 1.0,
        }
    )


def test_extra_numbers_are_means_over_the_samples_that_gave_them() -> None:
    kept = [
        episode(0, 0, score=0.0, extra_logs={"format": 1.0}),
        episode(0, 1, score=0.0, extra_logs={"format": 0.0, "accuracy": 0.25}),
        episode(0, 2, score=0.0),
    ]
    metrics = values(rollout_metrics(kept, kept))
    assert (metrics["train/format"], metrics["train/accuracy"]) == (0.5, 0.25)


def test_where_everything_failed_only_counts_are_left() -> None:
    metrics = values(rollout_metrics([failed(0, 0), failed(0, 1)], []))
    assert metrics == {"rollout/reward_std": 0.0, "rollout/num_samples": 0.0, "train/failed_episodes": 2.0}


# ---- the best evaluation


def test_the_first_pass_at_one_by_name_is_tracked() -> None:
    best = BestMetric("")
    assert best.improves({"eval/eval_b_pass1": 0.9, "eval/eval_a_pass4": 0.8, "eval/eval_a_pass1": 0.1})
    assert (best.key, best.value) == ("eval_a_pass1", 0.1)


def test_only_a_strictly_better_value_is_an_improvement() -> None:
    best = BestMetric("eval_a_pass1")
    improved = [best.improves({"eval/eval_a_pass1": value}) for value in (0.5, 0.5, 0.4, 0.6)]
    assert improved == [True, False, False, True]
    assert (best.value, best.last) == (0.6, 0.6)


def test_the_last_value_is_kept_beside_the_best_one() -> None:
    best = BestMetric("eval_a_pass1")
    for value in (0.5, 0.3):
        best.improves({"eval/eval_a_pass1": value})
    assert (best.value, best.last) == (0.5, 0.3)


def test_none_keeps_no_best() -> None:
    assert not BestMetric("none").improves({"eval/eval_a_pass1": 1.0})


def test_an_evaluation_without_the_metric_is_no_improvement() -> None:
    best = BestMetric("eval_a_pass1")
    assert not best.improves({"eval/eval_num_samples": 4.0})
    assert not BestMetric("").improves({"eval/eval_num_samples": 4.0})


def test_an_evaluation_in_which_everything_failed_neither_counts_nor_blocks_later_ones() -> None:
    best = BestMetric("eval_a_pass1")
    assert not best.improves({"eval/eval_a_pass1": math.nan})
    assert best.improves({"eval/eval_a_pass1": 0.1})
    assert not best.improves({"eval/eval_a_pass1": math.nan})
    assert best.value == 0.1


def test_a_resumed_run_has_to_beat_the_best_of_the_run_before() -> None:
    best = BestMetric("")
    best.restore("eval_a_pass1", 0.5)
    assert not best.improves({"eval/eval_a_pass1": 0.4})
    assert best.improves({"eval/eval_a_pass1": 0.6})


def test_a_best_of_another_metric_is_not_restored() -> None:
    best = BestMetric("eval_b_pass1")
    best.restore("eval_a_pass1", 0.5)
    assert best.improves({"eval/eval_b_pass1": 0.1})


def test_numbers_beside_a_reward_do_not_mix_with_ours() -> None:
    kept = [episode(score=1.0, extra_logs={"kl": 5.0, "actor_lr": 2.0, "format": 0.5, "reward_rule": 1.0})]
    metrics = values(rollout_metrics(kept, kept))
    assert "train/kl" not in metrics and "train/actor_lr" not in metrics
    own = {"train/user_kl": 5.0, "train/user_actor_lr": 2.0, "train/format": 0.5, "train/reward_rule": 1.0}
    assert own.items() <= metrics.items()
