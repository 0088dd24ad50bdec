"""Metrics of episodes: of a training step, and of an evaluation by data source."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from statistics import stdev
from typing import TypeVar

from openrlhf.core.trajectory import Trajectory
from openrlhf.observability.glossary import find_spec
from openrlhf.observability.metrics import Last, Mean, Metric, merge_all

T = TypeVar("T")


def rollout_metrics(
    trajectories: Sequence[Trajectory], kept: Sequence[Trajectory]
) -> dict[str, Metric]:
    """Metrics of a step's rollout, and the means of the user's extra numbers over the samples that
    have them.

    Every episode is kept, failed, filtered, or left out. An episode is left out if no other sample
    of its prompt has finished, or if it has no sampled token.
    """
    used = {(t.prompt.index, t.sample_index) for t in kept}
    finished = [t for t in trajectories if not t.failed and not t.filtered]
    left_out = sum((t.prompt.index, t.sample_index) not in used for t in finished)
    rewards = [t.reward for t in kept if t.reward is not None]
    metrics: dict[str, Metric] = {
        "rollout/reward_mean": Mean(sum(rewards), len(rewards)),
        "rollout/reward_std": Last(stdev(rewards) if len(rewards) > 1 else 0.0),
        "rollout/response_length_mean": Mean(sum(t.num_actions for t in kept), len(kept)),
        "rollout/truncated_rate": Mean(sum(t.truncated for t in kept), len(kept)),
        "rollout/num_samples": Last(float(len(kept))),
        "train/score": Mean(
            sum(t.score for t in kept if t.score is not None),
            sum(t.score is not None for t in kept),
        ),
        "train/failed_episodes": Last(float(sum(t.failed for t in trajectories))),
    }
    if played := [t for t in kept if t.turns is not None]:
        metrics["rollout/turns_mean"] = Mean(sum(t.turns or 0 for t in played), len(played))
        metrics["rollout/conversations_mean"] = Mean(
            sum(len(t.conversations) for t in played), len(played)
        )
    for failure, number in Counter(t.failure for t in trajectories if t.failure).items():
        metrics[f"train/failed_{failure}"] = Last(float(number))
    if left_out:
        metrics["train/left_out_episodes"] = Last(float(left_out))
    logs = [
        {_logged_as(name): Mean(value, 1) for name, value in t.extra_logs.items()} for t in kept
    ]
    return metrics | merge_all(logs)


def _logged_as(name: str) -> str:
    """The metric name of a user's extra number. A name of one of our metrics gets the prefix
    `user_`.
    """
    ours = find_spec(f"train/{name}") is not None and not name.startswith("reward_")
    return f"train/user_{name}" if ours else f"train/{name}"


def evaluation_metrics(trajectories: Sequence[Trajectory], *, k: int) -> dict[str, float]:
    """pass@1 and pass@k per data source, rewards, response lengths and truncation, under the logged
    names.

    pass@1 is the mean over prompts of the mean score of their samples; `score_stderr` is its
    standard error. pass@k is the mean over prompts of the best score. Failed samples are left out
    and counted.
    """
    finished = [t for t in trajectories if not t.failed]
    metrics = {
        "eval/eval_num_samples": float(len(trajectories)),
        "eval/eval_failed_episodes": float(len(trajectories) - len(finished)),
    }
    for source, members in group_by_source(finished, lambda t: t).items():
        metrics |= _source_metrics(f"eval/eval_{source}", members, k=k)
    if finished:
        metrics["eval/eval_response_length_mean"] = _mean([t.num_actions for t in finished])
        metrics["eval/eval_truncated_rate"] = _mean([t.truncated for t in finished])
    return metrics


def group_by_source(items: Iterable[T], episode: Callable[[T], Trajectory]) -> dict[str, list[T]]:
    """The items of each data source; the source of an item is the source of its episode."""
    sources: dict[str, list[T]] = {}
    for item in items:
        sources.setdefault(episode(item).prompt.datasource, []).append(item)
    return dict(sorted(sources.items()))


def source_columns(trajectories: Sequence[Trajectory], *, k: int) -> dict[str, float]:
    """The columns of a table about the episodes of one data source."""
    finished = [t for t in trajectories if not t.failed]
    numbers = _source_metrics("", finished, k=k)
    return {
        "prompts": len({t.prompt.index for t in trajectories}),
        "pass@1": numbers["_pass1"],
        f"pass@{k}": numbers[f"_pass{k}"],
        "reward": numbers["_reward_mean"],
        "tokens": numbers["_response_length_mean"],
        "truncated": numbers["_truncated_rate"],
        "failed": len(trajectories) - len(finished),
    }


def _source_metrics(prefix: str, members: Sequence[Trajectory], *, k: int) -> dict[str, float]:
    scores: dict[int, list[float]] = {}
    for t in members:
        if t.score is not None:
            scores.setdefault(t.prompt.index, []).append(t.score)
    means = [_mean(group) for group in scores.values()]
    error = {f"{prefix}_score_stderr": stdev(means) / len(means) ** 0.5} if len(means) > 1 else {}
    return error | {
        f"{prefix}_pass{k}": _mean([max(group) for group in scores.values()]),
        f"{prefix}_pass1": _mean(means),
        f"{prefix}_reward_mean": _mean([t.reward for t in members if t.reward is not None]),
        f"{prefix}_response_length_mean": _mean([t.num_actions for t in members]),
        f"{prefix}_truncated_rate": _mean([t.truncated for t in members]),
    }


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else float("nan")
