"""What an agent returned, made into an episode that can be trained on, by comparing token ids with
the engine's samples.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from openrlhf.core.trajectory import Failure, TrajectoryBuilder
from openrlhf.isolation.call import Asked, UserCodeError
from openrlhf.rewards.protocol import RewardResult, numbers, read_rewards, shown
from openrlhf.rollout.sampling import Generation

FINISHED = {"stop", "length", "abort"}  # ends of samples that an agent may go on from


class EpisodeMistake(UserCodeError):
    """What an executor returned is not an episode; the message says what is wrong."""

    def __init__(self, message: str) -> None:
        super().__init__(message, Failure.RESULT)


def samples_in(asked: Sequence[Asked]) -> list[Asked]:
    """What the engine answered with a sample; its other answers are refusals."""
    return [each for each in asked if isinstance(each.answer, Generation)]


@dataclass(frozen=True, kw_only=True)
class Assembled:
    """An episode's tokens, and what the agent said of it."""

    builder: TrajectoryBuilder
    reward: RewardResult
    truncated: bool
    turns: int
    earlier: Sequence[TrajectoryBuilder] = ()  # the conversations before the last one
    turn_rewards: tuple[
        tuple[int, float], ...
    ] = ()  # position of a turn's last token, and the turn's reward
    oddities: Sequence[str] = ()  # why log-probabilities are not the policy's
    notices: Mapping[str, str] = field(
        default_factory=dict[str, str]
    )  # sentences about the tokens, by kind


def assemble(
    result: Mapping[str, Any], samples: Sequence[Asked], max_length: int, *, vocabulary: int
) -> Assembled:
    """The episode that an executor returned, cut to `max_length` tokens, with the `samples_in` what
    it asked the engine.

    Sampled tokens get the log-probabilities and weight versions that the engine gave with them. The
    executor's own `rollout_log_probs` count only for tokens that the engine did not sample. Raises
    EpisodeMistake, and UserCodeError for a sample that the engine could not finish.
    """
    sampled = _Samples(samples)
    earlier: list[TrajectoryBuilder] = []
    turns = 0
    for conversation in _earlier(result):
        builder, ranges, _ = _built(conversation, sampled, max_length, vocabulary)
        turns += len(ranges)
        if any(builder.action_mask):
            earlier.append(builder)
    builder, ranges, uncut = _built(result, sampled, max_length, vocabulary)
    try:
        turn_rewards = _numbers(result, "turn_rewards", len(ranges), "action ranges")
        reward = _reward(result, turn_rewards)
    except (ValueError, OverflowError) as error:
        raise EpisodeMistake(f"execute or step {error}") from error
    rewarded: list[tuple[int, float]] = []
    for (start, end), amount in zip(ranges, turn_rewards or (), strict=False):
        if end > start:
            rewarded.append((min(end, max_length) - 1, amount))
    versions = {version for part in (*earlier, builder) for version in part.weight_versions}
    builder.weight_versions = sorted(versions) if earlier else builder.weight_versions
    return Assembled(
        builder=builder,
        reward=reward,
        truncated=bool(result.get("truncated")) or uncut > max_length,
        turns=turns + len(ranges),
        earlier=earlier,
        turn_rewards=tuple(rewarded),
        oddities=sampled.oddities,
        notices=_notices(result),
    )


def _built(
    conversation: Mapping[str, Any], sampled: "_Samples", max_length: int, vocabulary: int
) -> tuple[TrajectoryBuilder, list[tuple[int, int]], int]:
    """Return the tokens of a conversation, cut to `max_length`, its action ranges, and its length
    before the cut.
    """
    tokens, ranges = _tokens(conversation, sampled.samples, vocabulary), _ranges(conversation)
    try:
        given = _numbers(conversation, "rollout_log_probs", len(tokens), "tokens")
    except (ValueError, OverflowError) as error:
        raise EpisodeMistake(f"execute or step {error}") from error
    builder = TrajectoryBuilder(tokens[: ranges[0][0]])
    for start, end in ranges:
        builder.append_feedback(tokens[len(builder.tokens) : start])
        sampled.append_action(builder, tokens, end, given)
    builder.append_feedback(tokens[len(builder.tokens) :])
    builder.cut(max_length)
    return builder, ranges, len(tokens)


def _earlier(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the conversations before the last one."""
    given = result.get("earlier") or []
    if not isinstance(given, list) or not all(
        isinstance(conversation, Mapping) for conversation in given
    ):
        raise EpisodeMistake(
            f"earlier must be a list of dicts with observation_tokens and action_ranges, and is {shown(given)}"
        )
    return given


class _Samples:
    """The engine's samples, found again in order in the tokens of an episode."""

    def __init__(self, samples: Sequence[Asked]) -> None:
        self.samples = [sample for sample in samples if sample.answer.tokens]
        self.oddities: list[str] = []

    def append_action(
        self, builder: TrajectoryBuilder, tokens: list[int], end: int, given: list[float] | None
    ) -> None:
        """Append the rest of an action range, with log-probabilities and versions, sample by
        sample.
        """
        while (start := len(builder.tokens)) < end:
            sample = self._take(tokens, start, end)
            if sample is None:
                if given is None:
                    raise EpisodeMistake(
                        f"action_ranges name tokens {start} to {end - 1}, which the engine did not sample in this episode: "
                        "return the token_ids of its outputs, or rollout_log_probs with their log-probabilities"
                    )
                self.oddities.append("has action_ranges with tokens that the engine did not sample")
                builder.append_action(tokens[start:end], given[start:end])
                return
            found: Generation = sample.answer
            builder.append_action(
                found.tokens[: end - start], found.logprobs[: end - start], found.weight_versions
            )

    def _take(self, tokens: list[int], start: int, end: int) -> Asked | None:
        """The sample that covers most of what is at `start`. One that continued exactly the tokens
        before it is preferred.

        If nobody knows which episode asked for a sample, only such an exact sample counts.
        """
        span = tokens[start:end]
        fitting = [
            s for s in self.samples if s.answer.tokens[: len(span)] == span[: len(s.answer.tokens)]
        ]
        exact = [sample for sample in fitting if sample.question["prompt"] == tokens[:start]]
        fitting = [sample for sample in fitting if sample.own]
        if fitting and not exact:
            self.oddities.append(
                "shows the engine other tokens than those before the action in observation_tokens"
            )
        if not (exact or fitting):
            return None
        chosen = max(
            exact or fitting,
            key=lambda sample: (sample.own, min(len(sample.answer.tokens), end - start)),
        )
        self.samples.remove(chosen)
        if (reason := chosen.answer.finish_reason) not in FINISHED:
            raise UserCodeError(f"the engine ended a sample: {reason}", Failure.ENGINE)
        return chosen


def _tokens(result: Mapping[str, Any], samples: Sequence[Asked], vocabulary: int) -> list[int]:
    tokens = result.get("observation_tokens")
    if (
        not isinstance(tokens, list)
        or not tokens
        or not all(type(t) is int and t >= 0 for t in tokens)
    ):
        raise EpisodeMistake(
            f"observation_tokens must be a list of token ids, and is {shown(tokens)}"
        )
    beyond = {t for t in tokens if t >= vocabulary}.difference(
        *(sample.answer.tokens for sample in samples)
    )
    if beyond:
        raise EpisodeMistake(
            f"observation_tokens have {sorted(beyond)[:3]}; the tokenizer's ids go to {vocabulary - 1}"
        )
    return tokens


def _ranges(result: Mapping[str, Any]) -> list[tuple[int, int]]:
    """The action ranges, checked to be in order and inside the episode."""
    ranges, length = result.get("action_ranges"), len(result["observation_tokens"])
    pairs = isinstance(ranges, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(type(edge) is int for edge in pair)
        for pair in ranges
    )
    if not pairs or not ranges:
        raise EpisodeMistake(
            f"action_ranges must be a list of [start, end) pairs, at least one, and is {shown(ranges)}"
        )
    edges = [edge for pair in ranges for edge in pair]
    if edges != sorted(edges) or edges[0] < 0 or edges[-1] > length:
        raise EpisodeMistake(
            f"action_ranges must go up and stay within {length} tokens, and are {shown(ranges)}"
        )
    if edges[0] == 0:
        raise EpisodeMistake(
            f"action_ranges start at token 0, which the policy cannot have sampled, since nothing precedes it: {shown(ranges)}. "
            "Positions count from the beginning of observation_tokens, prompt included"
        )
    return [(start, end) for start, end in ranges]


def _numbers(result: Mapping[str, Any], name: str, count: int, of: str) -> list[float] | None:
    """What the executor gives under this name, a number for each of `count` tokens or action
    ranges; None if it gives nothing.
    """
    return (
        None if result.get(name) is None else numbers(name, result[name], count, of=of, finite=True)
    )


def _notices(result: Mapping[str, Any]) -> dict[str, str]:
    """Return the notices of our own executors; a user's executor may give something else under this
    name.
    """
    given = result.get("notices")
    if not isinstance(given, Mapping):
        return {}
    return {str(kind): str(sentence) for kind, sentence in given.items()}


def _reward(result: Mapping[str, Any], turns: Sequence[float] | None) -> RewardResult:
    """The episode's reward, by default the sum of its turns; without either, a reward model still
    has to give one.
    """
    reward = result.get("reward")
    if reward is None and turns:
        reward = math.fsum(turns)
    if reward is None:
        [unscored] = read_rewards({"rewards": 0.0, "extra_logs": result.get("extra_logs")}, 1)
        return RewardResult(extra_logs=unscored.extra_logs)
    return read_rewards({**result, "rewards": reward}, 1)[0]
