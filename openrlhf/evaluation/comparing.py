"""Pairs of answers, which one is better, and what that says of a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from openrlhf.observability.run_folder import sample_row
from openrlhf.rewards.budget import ErrorBudget, RewardErrors
from openrlhf.rollout.episode_metrics import of_sources
from openrlhf.trajectory import Failure, Trajectory


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two answers to one prompt. `win`: 1.0 ours is better, 0.0 theirs, 0.5 neither; None: nobody can tell, and why."""

    ours: Trajectory
    theirs: Trajectory
    win: float | None = None
    error: str | None = None
    failure: Failure | None = None

    @property
    def margin(self) -> float:
        """By how much our reward is the larger; NaN where one is missing."""
        ours, theirs = self.ours.reward, self.theirs.reward
        return math.nan if ours is None or theirs is None else ours - theirs


def pair_up(ours: Sequence[Trajectory], theirs: Sequence[Trajectory]) -> list[Comparison]:
    """Each of our answers with their answer of the same number to the same prompt; one answer meets all of ours."""
    answers: dict[int, list[Trajectory]] = {}
    for answer in theirs:
        answers.setdefault(answer.prompt.index, []).append(answer)
    pairs: list[Comparison] = []
    for answer in ours:
        others = answers[answer.prompt.index]
        other = others[answer.sample_index % len(others)]
        failed = next((t for t in (answer, other) if t.failed), None)
        error, failure = (failed.error, failed.failure) if failed else (None, None)
        pairs.append(Comparison(ours=answer, theirs=other, error=error, failure=failure))
    return pairs


def by_reward(pair: Comparison) -> float | None:
    """Who has the larger reward."""
    return None if math.isnan(pair.margin) else (1.0 if pair.margin > 0 else 0.5 if pair.margin == 0 else 0.0)


def check_errors(pairs: Sequence[Comparison], errors: ErrorBudget) -> None:
    """Raise RewardErrors, with the first error, if too many pairs could not be judged."""
    failed = [pair for pair in pairs if pair.win is None]
    if errors.exceeded_by(len(failed), of=len(pairs)):
        raise RewardErrors(
            f"{len(failed)} of {len(pairs)} pairs could not be judged, a larger share than --reward.max_error_rate "
            f"{errors.max_error_rate:g}. To get the rest all the same, raise it or set --reward.on_error drop. "
            f"The first error:\n{failed[0].error}"
        )


def win_rate(pairs: Sequence[Comparison]) -> tuple[float, float]:
    """The mean over prompts of the mean win of their pairs, ties one half; and its standard error, prompts being independent.

    Failed pairs are left out. NaN where there is nothing to average, the error where there are fewer than two prompts.
    """
    prompts: dict[int, list[float]] = {}
    for pair in pairs:
        if pair.win is not None:
            prompts.setdefault(pair.ours.prompt.index, []).append(pair.win)
    means = [fmean(wins) for wins in prompts.values()]
    rate = fmean(means) if means else math.nan
    return rate, stdev(means) / math.sqrt(len(means)) if len(means) > 1 else math.nan


def win_metrics(pairs: Sequence[Comparison]) -> dict[str, float]:
    """The win rate with its standard error, of everything and per data source, and the counts, under the logged names.

    A rate of no pairs and an error of fewer than two prompts are left out.
    """
    rate, error = win_rate(pairs)
    wins = [pair.win for pair in pairs if pair.win is not None]
    metrics = {
        "eval/win_rate": rate,
        "eval/win_rate_stderr": error,
        "eval/wins": float(wins.count(1.0)),
        "eval/ties": float(wins.count(0.5)),
        "eval/losses": float(wins.count(0.0)),
        "eval/failed_pairs": float(len(pairs) - len(wins)),
    }
    for source, members in of_sources(pairs, lambda pair: pair.ours).items():
        rate, error = win_rate(members)
        metrics |= {f"eval/eval_{source}_win_rate": rate, f"eval/eval_{source}_win_rate_stderr": error}
    return {name: value for name, value in metrics.items() if not math.isnan(value)}


def accuracy_metrics(pairs: Sequence[Comparison]) -> dict[str, float]:
    """How often, and by how much, the chosen answer has the larger reward; and mean and deviation of all rewards.

    Under the names of the evaluation in reward-model training; as there, equal rewards are no success.
    """
    judged = [pair for pair in pairs if pair.win is not None]
    rewards = [t.reward for pair in judged for t in (pair.ours, pair.theirs) if t.reward is not None]
    metrics = {"eval/failed_pairs": float(len(pairs) - len(judged))}
    if judged:
        metrics |= _accuracy("eval/", judged)
        metrics |= {"eval/reward_mean": fmean(rewards), "eval/reward_std": max(stdev(rewards), 1e-8)}
    for source, members in of_sources(judged, lambda pair: pair.ours).items():
        metrics |= _accuracy(f"eval/eval_{source}_", members)
    return metrics


def _accuracy(prefix: str, judged: Sequence[Comparison]) -> dict[str, float]:
    return {
        f"{prefix}acc_mean": fmean(pair.win == 1.0 for pair in judged) if judged else math.nan,
        f"{prefix}margin_mean": fmean(pair.margin for pair in judged) if judged else math.nan,
    }


def win_columns(pairs: Sequence[Comparison]) -> dict[str, float]:
    """What a table shows of the pairs of a data source."""
    rate, error = win_rate(pairs)
    wins = [pair.win for pair in pairs]
    return {
        "pairs": len(pairs),
        "wins": wins.count(1.0),
        "ties": wins.count(0.5),
        "losses": wins.count(0.0),
        "failed": wins.count(None),
        "win rate": rate,
        "standard error": error,
    }


def accuracy_columns(pairs: Sequence[Comparison]) -> dict[str, float]:
    """The same of rewards."""
    judged = [pair for pair in pairs if pair.win is not None]
    numbers = _accuracy("", judged)
    failed = len(pairs) - len(judged)
    return {"pairs": len(pairs), "accuracy": numbers["acc_mean"], "margin": numbers["margin_mean"], "failed": failed}


def row_of(pair: Comparison) -> dict[str, Any]:
    """The line of samples.jsonl: `response` and `reward` are of our answer; `win` is 1.0 if our answer is the better one."""
    return sample_row(0, pair.ours) | {
        "against": pair.theirs.response_text,
        "against_reward": pair.theirs.reward,
        "win": pair.win,
        "error": pair.error,
        "failure": pair.failure,
    }
