"""Pairs of answers, the choice of the better answer, and metrics over pairs."""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from statistics import fmean, stdev
from typing import Any

from transformers import PreTrainedTokenizerBase

from openrlhf.core.trajectory import Failure, Prompt, StopReason, Trajectory, TrajectoryBuilder
from openrlhf.masking import hide
from openrlhf.observability.run_folder import sample_row
from openrlhf.rewards.judge import Judge, NoVerdict
from openrlhf.rewards.servers import ServerError
from openrlhf.rollout.episode_metrics import group_by_source, mean_or_nan

# Computes a table row: numbers by column name. Counts are integers.
Columns = Callable[[Sequence["Comparison"]], Mapping[str, float]]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two answers to one prompt.

    `win` is 1.0 if our answer is better, 0.0 if theirs is better, and 0.5 for a tie. If the pair
    could not be judged, `win` is None and `error` gives the reason.
    """

    ours: Trajectory
    theirs: Trajectory
    win: float | None = None
    error: str | None = None
    failure: Failure | None = None

    @property
    def margin(self) -> float:
        """Our reward minus their reward; NaN if either is missing."""
        if self.ours.reward is None or self.theirs.reward is None:
            return math.nan
        return self.ours.reward - self.theirs.reward


def pair_up(ours: Sequence[Trajectory], theirs: Sequence[Trajectory]) -> list[Comparison]:
    """Pair each of our answers with the other model's answer that has the same prompt and index.

    If the other model has only one answer to a prompt, that answer is paired with all of ours. A
    pair with a failed answer gets that answer's error.
    """
    answers: dict[int, list[Trajectory]] = {}
    for answer in theirs:
        answers.setdefault(answer.prompt.index, []).append(answer)
    pairs: list[Comparison] = []
    for answer in ours:
        others = answers[answer.prompt.index]
        other = others[answer.sample_index % len(others)]
        pair = Comparison(ours=answer, theirs=other)
        failed = [each for each in (answer, other) if each.failed]
        if failed:
            pair = replace(pair, error=failed[0].error, failure=failed[0].failure)
        pairs.append(pair)
    return pairs


def by_reward(pair: Comparison) -> float | None:
    """Return the win (1.0, 0.5 or 0.0) that the rewards imply, or None if a reward is missing."""
    if math.isnan(pair.margin):
        return None
    if pair.margin == 0:
        return 0.5
    return float(pair.margin > 0)


def given_text(
    tokenizer: PreTrainedTokenizerBase, number: int, source: str, tokens: list[int]
) -> Trajectory:
    """Wrap a text in an episode that a reward model can score.

    `number` is the index of the text's pair or row; `source` is the text's data source.
    """
    prompt = Prompt(index=number, text="", tokens=[], datasource=source)
    return TrajectoryBuilder(tokens).finish(
        prompt=prompt,
        sample_index=0,
        stop_reason=StopReason.STOP,
        response_text=str(tokenizer.decode(tokens)),
    )


async def judged(
    judge: Judge, pairs: Sequence[Comparison], readers: Sequence[PreTrainedTokenizerBase]
) -> list[Comparison]:
    """Return the pairs with the judge's verdicts. Pairs with a failed answer are not judged.

    `readers` are the tokenizers that decode our tokens and theirs.
    """
    our_tokenizer, their_tokenizer = readers

    async def verdict(pair: Comparison) -> Comparison:
        if pair.error:
            return pair
        message = readable(our_tokenizer, pair.ours.prompt.tokens)
        our_answer = readable(our_tokenizer, sampled(pair.ours))
        their_answer = readable(their_tokenizer, sampled(pair.theirs))
        try:
            return replace(pair, win=await judge.compare(message, our_answer, their_answer))
        except (ServerError, NoVerdict) as error:
            return replace(pair, error=str(error), failure=error.failure)

    return list(await asyncio.gather(*map(verdict, pairs)))


def readable(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    """Decode tokens, leaving out special tokens."""
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True))


def sampled(answer: Trajectory) -> list[int]:
    """Return the tokens that the policy sampled."""
    return list(compress(answer.tokens, answer.action_mask))


def win_rate(pairs: Sequence[Comparison]) -> tuple[float, float]:
    """Return the mean win, averaged first over the pairs of each prompt, and its standard error.

    A tie counts as one half. The standard error is computed over prompts. Failed pairs are ignored.
    The win rate is NaN if there are no pairs, and its standard error is NaN if there are fewer than
    two prompts.
    """
    prompts: dict[int, list[float]] = {}
    for pair in pairs:
        if pair.win is not None:
            prompts.setdefault(pair.ours.prompt.index, []).append(pair.win)
    means = list(map(fmean, prompts.values()))
    error = math.nan
    if len(means) > 1:
        error = stdev(means) / math.sqrt(len(means))
    return mean_or_nan(means), error


def win_columns(pairs: Sequence[Comparison]) -> dict[str, float]:
    """Return the columns of a win table: counts, and the win rate with its standard error."""
    rate, error = win_rate(pairs)
    wins = [pair.win for pair in pairs]
    return {
        "wins": wins.count(1.0),
        "ties": wins.count(0.5),
        "losses": wins.count(0.0),
        "failed_pairs": wins.count(None),
        "win_rate": rate,
        "win_rate_stderr": error,
    }


def accuracy_columns(pairs: Sequence[Comparison]) -> dict[str, float]:
    """Return the columns of a reward table: accuracy, margin and failed pairs.

    A pair counts as correct if the chosen answer has the larger reward. Unlike in `train/acc`,
    equal rewards do not count as correct.
    """
    judged = _judged_pairs(pairs)
    return {
        "acc_mean": mean_or_nan([pair.win == 1.0 for pair in judged]),
        "margin_mean": mean_or_nan([pair.margin for pair in judged]),
        "failed_pairs": len(pairs) - len(judged),
    }


def _judged_pairs(pairs: Sequence[Comparison]) -> list[Comparison]:
    return [pair for pair in pairs if pair.win is not None]


def metrics_of(pairs: Sequence[Comparison], columns: Columns) -> dict[str, float]:
    """Return a table's numbers by metric name; rates are also returned per data source.

    NaNs, such as a win rate without pairs, are omitted.
    """
    metrics: dict[str, float] = {}
    for column, value in columns(pairs).items():
        metrics[f"eval/{column}"] = float(value)
    for source, members in group_by_source(pairs, lambda pair: pair.ours).items():
        for column, value in columns(members).items():
            if isinstance(value, float):
                metrics[f"eval/eval_{source}_{column}"] = value
    return {name: value for name, value in metrics.items() if not math.isnan(value)}


def reward_metrics(pairs: Sequence[Comparison]) -> dict[str, float]:
    """Return the mean and standard deviation of the rewards in judged pairs.

    The names are the same as in reward-model training.
    """
    rewards: list[float] = []
    for pair in _judged_pairs(pairs):
        for answer in (pair.ours, pair.theirs):
            if answer.reward is not None:
                rewards.append(answer.reward)
    if not rewards:
        return {}
    return {"eval/reward_mean": fmean(rewards), "eval/reward_std": max(stdev(rewards), 1e-8)}


def row_of(pair: Comparison) -> dict[str, Any]:
    """Return a pair's row for samples.jsonl.

    `response` and `reward` describe our answer. `win` is 1.0 if our answer is better.
    """
    return sample_row(0, pair.ours, evaluation=True) | {
        "against": pair.theirs.response_text,
        "against_reward": pair.theirs.reward,
        "win": pair.win,
        "error": hide(pair.error),
        "failure": pair.failure,
    }
