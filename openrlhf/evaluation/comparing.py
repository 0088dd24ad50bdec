"""Pairs of answers, which one is better, and what that says of a model."""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

from transformers import PreTrainedTokenizerBase

from openrlhf.config.secrets import hide
from openrlhf.core.trajectory import Failure, Prompt, StopReason, Trajectory, TrajectoryBuilder
from openrlhf.observability.run_folder import sample_row
from openrlhf.rewards.judge import Judge, NoVerdict
from openrlhf.rewards.servers import ServerError
from openrlhf.rollout.episode_metrics import group_by_source

# The numbers of a table's row by their logged names; counts are integers.
Columns = Callable[[Sequence["Comparison"]], Mapping[str, float]]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two answers to one prompt. `win`: 1.0 if ours is better, 0.0 if theirs is, 0.5 if neither is;
    None, with an error, if nobody can tell.
    """

    ours: Trajectory
    theirs: Trajectory
    win: float | None = None
    error: str | None = None
    failure: Failure | None = None

    @property
    def margin(self) -> float:
        """Our reward minus theirs; NaN if one is missing."""
        ours, theirs = self.ours.reward, self.theirs.reward
        return math.nan if ours is None or theirs is None else ours - theirs


def pair_up(ours: Sequence[Trajectory], theirs: Sequence[Trajectory]) -> list[Comparison]:
    """Pair each of our answers with their answer to the same prompt that has the same number; a
    single one is paired with all of ours.
    """
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
    """1.0 if our reward is larger, 0.0 if theirs is, 0.5 if they are equal; None if one is missing."""
    return (
        None
        if math.isnan(pair.margin)
        else (1.0 if pair.margin > 0 else 0.5 if pair.margin == 0 else 0.0)
    )


def given_text(
    tokenizer: PreTrainedTokenizerBase, number: int, source: str, tokens: list[int]
) -> Trajectory:
    """A whole text of pair `number` as an episode that a reward model can score."""
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
    """The pairs with the judge's verdicts; a pair with a failed answer stays as it is. `readers`
    decode our tokens and theirs.
    """

    async def verdict(pair: Comparison) -> Comparison:
        if pair.error:
            return pair
        ours, theirs = readers
        message = readable(ours, pair.ours.prompt.tokens)
        answers = readable(ours, sampled(pair.ours)), readable(theirs, sampled(pair.theirs))
        try:
            return replace(pair, win=await judge.compare(message, *answers))
        except (ServerError, NoVerdict) as error:
            return replace(pair, error=str(error), failure=error.failure)

    return list(await asyncio.gather(*map(verdict, pairs)))


def readable(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    """Text as a person reads it, without special tokens."""
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True))


def sampled(answer: Trajectory) -> list[int]:
    """The tokens of the answer alone."""
    return [token for token, acted in zip(answer.tokens, answer.action_mask, strict=True) if acted]


def win_rate(pairs: Sequence[Comparison]) -> tuple[float, float]:
    """The mean over prompts of the mean win of their pairs (a tie counts one half), and its
    standard error over prompts.

    Failed pairs are left out. Without pairs the rate is NaN; with fewer than two prompts the error
    is NaN.
    """
    prompts: dict[int, list[float]] = {}
    for pair in pairs:
        if pair.win is not None:
            prompts.setdefault(pair.ours.prompt.index, []).append(pair.win)
    means = [fmean(wins) for wins in prompts.values()]
    rate = fmean(means) if means else math.nan
    return rate, stdev(means) / math.sqrt(len(means)) if len(means) > 1 else math.nan


def win_columns(pairs: Sequence[Comparison]) -> dict[str, float]:
    """The columns of a table of wins: the counts, and the win rate with its standard error."""
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
    """The columns of a table of rewards: how often, and by how much, the chosen answer has the
    larger reward.

    As in reward-model training, equal rewards are no success.
    """
    judged = [pair for pair in pairs if pair.win is not None]
    return {
        "acc_mean": fmean(pair.win == 1.0 for pair in judged) if judged else math.nan,
        "margin_mean": fmean(pair.margin for pair in judged) if judged else math.nan,
        "failed_pairs": len(pairs) - len(judged),
    }


def metrics_of(pairs: Sequence[Comparison], columns: Columns) -> dict[str, float]:
    """The numbers of a table under their logged names: of all pairs, and the rates also per data
    source.

    A number that is NaN, such as a rate of no pairs, is left out.
    """
    metrics = {f"eval/{column}": float(value) for column, value in columns(pairs).items()}
    for source, members in group_by_source(pairs, lambda pair: pair.ours).items():
        rates = {
            column: value for column, value in columns(members).items() if isinstance(value, float)
        }
        metrics |= {f"eval/eval_{source}_{column}": value for column, value in rates.items()}
    return {name: value for name, value in metrics.items() if not math.isnan(value)}


def reward_metrics(pairs: Sequence[Comparison]) -> dict[str, float]:
    """Mean and deviation of both rewards of the pairs that have them, under the names of
    reward-model training.
    """
    judged = [pair for pair in pairs if pair.win is not None]
    rewards = [
        t.reward for pair in judged for t in (pair.ours, pair.theirs) if t.reward is not None
    ]
    return (
        {"eval/reward_mean": fmean(rewards), "eval/reward_std": max(stdev(rewards), 1e-8)}
        if rewards
        else {}
    )


def row_of(pair: Comparison) -> dict[str, Any]:
    """The line of samples.jsonl: `response` and `reward` are of our answer; `win` is 1.0 if our
    answer is the better one.
    """
    return sample_row(0, pair.ours, evaluation=True) | {
        "against": pair.theirs.response_text,
        "against_reward": pair.theirs.reward,
        "win": pair.win,
        "error": hide(pair.error),
        "failure": pair.failure,
    }
