"""Metrics for the episodes of a training step, and for evaluations by data source."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, stdev
from typing import TypeVar

from openrlhf.core.trajectory import Exclusion, Trajectory
from openrlhf.observability.glossary import find_spec
from openrlhf.observability.metrics import Last, Mean, Metric, merge_all

T = TypeVar("T")
LEFT_OUT = (Exclusion.EMPTY, Exclusion.ALONE)  # counted in `train/left_out_episodes`


def rollout_metrics(
    trajectories: Sequence[Trajectory], exclusions: Sequence[Exclusion | None]
) -> dict[str, Metric]:
    """Return the rollout metrics of a step.

    `exclusions` contains the reason why each episode is not trained on, or None for kept episodes.
    """
    kept: list[Trajectory] = []
    counts = Counter({"rollout/num_samples": 0, "train/failed_episodes": 0})
    for episode, exclusion in zip(trajectories, exclusions, strict=True):
        if episode.failure:
            counts[f"train/failed_{episode.failure}"] += 1
        if exclusion is None:
            counts["rollout/num_samples"] += 1
            kept.append(episode)
        elif exclusion is Exclusion.FAILED:
            counts["train/failed_episodes"] += 1
        elif exclusion in LEFT_OUT:
            counts["train/left_out_episodes"] += 1
    rewards = [episode.reward for episode in kept if episode.reward is not None]
    reward_std = 0.0
    if len(rewards) > 1:
        reward_std = stdev(rewards)
    metrics: dict[str, Metric] = {"rollout/reward_std": Last(reward_std)}
    for name, number in counts.items():
        metrics[name] = Last(float(number))
    return metrics | merge_all(map(_episode_metrics, kept))


def _episode_metrics(episode: Trajectory) -> dict[str, Metric]:
    """Return a kept episode's contributions to the means, including extra logs from user code.

    An extra log that has the name of a built-in metric gets the prefix `user_`.
    """
    metrics: dict[str, Metric] = {
        "rollout/response_length_mean": Mean(episode.num_actions, 1),
        "rollout/truncated_rate": Mean(episode.truncated, 1),
    }
    if episode.reward is not None:
        metrics["rollout/reward_mean"] = Mean(episode.reward, 1)
    if episode.score is not None:
        metrics["train/score"] = Mean(episode.score, 1)
    if episode.turns is not None:
        metrics["rollout/turns_mean"] = Mean(episode.turns, 1)
        metrics["rollout/conversations_mean"] = Mean(len(episode.conversations), 1)
    for name, value in episode.extra_logs.items():
        if find_spec(f"train/{name}") is not None and not name.startswith("reward_"):
            name = f"user_{name}"
        metrics[f"train/{name}"] = Mean(value, 1)
    return metrics


def evaluation_metrics(trajectories: Sequence[Trajectory], *, k: int) -> dict[str, float]:
    """Return an evaluation's metrics under their logged names.

    Each data source gets pass@1, pass@k, rewards, response lengths and truncation. pass@1 is the
    mean over prompts of the mean score of their samples; `score_stderr` is its standard error.
    pass@k is the mean over prompts of the best score. Failed samples are counted, but excluded from
    all other metrics.
    """
    finished = [episode for episode in trajectories if not episode.failed]
    metrics = {
        "eval/eval_num_samples": float(len(trajectories)),
        "eval/eval_failed_episodes": float(len(trajectories) - len(finished)),
    }
    for source, members in group_by_source(finished, lambda episode: episode).items():
        for name, number in _source_metrics(members, k=k).items():
            metrics[f"eval/eval_{source}_{name}"] = number
    if finished:
        overall = _source_metrics(finished, k=k)
        for name in ("response_length_mean", "truncated_rate"):
            metrics[f"eval/eval_{name}"] = overall[name]
    return metrics


def group_by_source(items: Iterable[T], episode: Callable[[T], Trajectory]) -> dict[str, list[T]]:
    """Group items by the data source of their episodes."""
    sources: dict[str, list[T]] = {}
    for item in items:
        sources.setdefault(episode(item).prompt.datasource, []).append(item)
    return dict(sorted(sources.items()))


def source_columns(trajectories: Sequence[Trajectory], *, k: int) -> dict[str, float]:
    """Return the table columns for the episodes of one data source."""
    finished = [episode for episode in trajectories if not episode.failed]
    metrics = _source_metrics(finished, k=k)
    return {
        "prompts": len({episode.prompt.index for episode in trajectories}),
        "pass@1": metrics["pass1"],
        f"pass@{k}": metrics[f"pass{k}"],
        "reward": metrics["reward_mean"],
        "tokens": metrics["response_length_mean"],
        "truncated": metrics["truncated_rate"],
        "failed": len(trajectories) - len(finished),
    }


def _source_metrics(finished: Sequence[Trajectory], *, k: int) -> dict[str, float]:
    scores: dict[int, list[float]] = {}  # by prompt
    for episode in finished:
        if episode.score is not None:
            scores.setdefault(episode.prompt.index, []).append(episode.score)
    rewards = [episode.reward for episode in finished if episode.reward is not None]
    means = list(map(mean_or_nan, scores.values()))
    metrics: dict[str, float] = {}
    if len(means) > 1:
        metrics["score_stderr"] = stdev(means) / len(means) ** 0.5
    metrics[f"pass{k}"] = mean_or_nan(list(map(max, scores.values())))
    metrics["pass1"] = mean_or_nan(means)
    metrics["reward_mean"] = mean_or_nan(rewards)
    metrics["response_length_mean"] = mean_or_nan([episode.num_actions for episode in finished])
    metrics["truncated_rate"] = mean_or_nan([episode.truncated for episode in finished])
    return metrics


def mean_or_nan(numbers: Sequence[float]) -> float:
    """Return the mean, or NaN if there are no numbers."""
    if not numbers:
        return math.nan
    return fmean(numbers)
