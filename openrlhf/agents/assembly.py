"""Converts an executor's result into an episode for training.

The result is validated, and its token ids are matched with the engine's samples.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from openrlhf.agents.answers import packed
from openrlhf.core.trajectory import Failure, TrajectoryBuilder
from openrlhf.isolation.call import Asked, UserCodeError
from openrlhf.rewards.protocol import RewardResult, numbers, read_rewards, shown
from openrlhf.rollout.sampling import Generation

FINISHED = {"stop", "length", "abort"}  # finish reasons of samples that are suitable for training


Index = Annotated[int, Field(strict=True, ge=0)]
Range = Annotated[list[Index], Field(min_length=2, max_length=2)]  # [start, end)


class EpisodeMistake(UserCodeError):
    """Error for an executor's result that is not a valid episode.

    The message includes the invalid value.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, Failure.RESULT)


class _Entry(BaseModel):
    """One conversation in an executor's result."""

    observation_tokens: list[Index] = Field(min_length=1)
    action_ranges: list[Range] = Field(min_length=1)
    rollout_log_probs: Any = None


class _Result(_Entry):
    """An executor's result: the last conversation and the earlier conversations."""

    earlier: list[_Entry] | None = None


@dataclass(frozen=True, kw_only=True)
class Assembled:
    """An episode: its tokens, and the agent's reward, logs and notices."""

    builder: TrajectoryBuilder
    reward: RewardResult
    truncated: bool
    turns: int
    earlier: Sequence[TrajectoryBuilder] = ()  # the episode's conversations before the last one
    # A pair (position of the turn's last token, reward of the turn) for each rewarded turn.
    turn_rewards: tuple[tuple[int, float], ...] = ()
    notices: Mapping[str, str]  # messages for the user, keyed by kind of notice


def assemble(
    result: Mapping[str, Any], asked: Sequence[Asked], max_length: int, *, vocabulary: int
) -> Assembled:
    """Convert an executor's result to an episode, truncated to `max_length` tokens.

    `asked` holds the episode's requests to the engine. Sampled tokens get the log-probabilities and
    weight versions that the engine returned with them. The executor's own `rollout_log_probs` are
    used only for tokens that the engine did not sample. Raises EpisodeMistake for an invalid
    result, and UserCodeError for a sample that the engine could not finish.
    """
    checked = _checked(result)
    samples = _Samples(asked)
    entries = [*(checked.earlier or []), checked]
    *earlier, last = [_build(entry, samples, max_length, vocabulary) for entry in entries]
    ranges = checked.action_ranges
    turn_rewards = _numbers(
        "turn_rewards", result.get("turn_rewards"), len(ranges), "action ranges"
    )
    rewarded: list[tuple[int, float]] = []
    for (start, end), amount in zip(ranges, turn_rewards or (), strict=False):
        if end > start:
            rewarded.append((min(end, max_length) - 1, amount))
    versions = set(last.weight_versions).union(*(each.weight_versions for each in earlier))
    last.weight_versions = sorted(versions)
    notices = result.get("notices")
    if not isinstance(notices, dict):  # a user's executor may use this key for another purpose
        notices = {}
    return Assembled(
        builder=last,
        reward=_reward(result, turn_rewards),
        # Feedback after the last action does not count: the policy has already ended its turn.
        truncated=bool(result.get("truncated")) or ranges[-1][1] > max_length,
        turns=sum(len(entry.action_ranges) for entry in entries),
        earlier=[each for each in earlier if any(each.action_mask)],
        turn_rewards=tuple(rewarded),
        notices=notices | samples.notices,
    )


def _checked(result: Mapping[str, Any]) -> _Result:
    """Return the result with checked token ids and ranges. Raises EpisodeMistake."""
    try:
        return _Result.model_validate(result)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"]))
        name = str(problem["loc"][0])
        raise EpisodeMistake(
            f"{place}: {problem['msg']}. {name} is {shown(result.get(name))}"
        ) from error


def _build(
    entry: _Entry, samples: "_Samples", max_length: int, vocabulary: int
) -> TrajectoryBuilder:
    """Return the tokens of one conversation, truncated to the maximum length."""
    tokens = entry.observation_tokens
    _check_tokens(tokens, samples.unused, vocabulary)
    _check_ranges(entry.action_ranges, len(tokens))
    given = _numbers("rollout_log_probs", entry.rollout_log_probs, len(tokens), "tokens")
    first_action, _ = entry.action_ranges[0]
    builder = TrajectoryBuilder(tokens[:first_action])
    for start, end in entry.action_ranges:
        builder.append_feedback(tokens[len(builder.tokens) : start])
        samples.append_action(builder, tokens, end, given)
    builder.append_feedback(tokens[len(builder.tokens) :])
    builder.cut(max_length)
    return builder


class _Samples:
    """The engine's samples, matched in order with an episode's tokens.

    Requests that the engine rejected are ignored.
    """

    def __init__(self, asked: Sequence[Asked]) -> None:
        self.unused: list[Asked] = []
        for request in asked:
            if isinstance(request.answer, Generation) and request.answer.tokens:
                self.unused.append(request)
        self.notices: dict[str, str] = {}

    def append_action(
        self, builder: TrajectoryBuilder, tokens: list[int], end: int, given: list[float] | None
    ) -> None:
        """Append the tokens up to `end`, the end of an action range, one sample at a time."""
        while (start := len(builder.tokens)) < end:
            sample = self._take(tokens, start, end)
            if sample is None:
                if given is None:
                    raise EpisodeMistake(
                        f"action_ranges include tokens {start} to {end - 1}, which the engine did "
                        "not sample in this episode. Return the engine's token_ids, or provide "
                        "rollout_log_probs with their log-probabilities"
                    )
                self.notices["not sampled"] = (
                    "action_ranges include tokens that the engine did not sample, so their "
                    "rollout_log_probs may differ from the policy's"
                )
                builder.append_action(tokens[start:end], given[start:end])
                return
            length = end - start
            builder.append_action(
                sample.tokens[:length], sample.logprobs[:length], sample.weight_versions
            )

    def _take(self, tokens: list[int], start: int, end: int) -> Generation | None:
        """Remove from `unused` the longest sample that matches the tokens at `start`. Return it.

        Samples whose prompt equals the tokens before `start` are preferred. A sample that may
        belong to another episode is used only if its prompt equals the tokens before `start`.
        """
        span = tokens[start:end]
        before = packed(tokens[:start])
        matching: list[tuple[bool, bool, int, int]] = []
        for index, request in enumerate(self.unused):
            sampled = request.answer.tokens
            follows = request.question["prompt"] == before
            if sampled[: len(span)] == span[: len(sampled)] and (follows or request.own):
                length = min(len(sampled), len(span))
                matching.append((follows, request.own, length, -index))
        if not matching:
            return None
        follows, _, _, place = max(matching)
        if not follows:
            self.notices["other context"] = (
                "the tokens before an action in observation_tokens differ from the prompt that "
                "the engine sampled the action from, so the action's log-probabilities are not "
                "the policy's"
            )
        sample: Generation = self.unused.pop(-place).answer
        if sample.finish_reason not in FINISHED:
            raise UserCodeError(
                f"a sample failed in the engine: {sample.finish_reason}", Failure.ENGINE
            )
        return sample


def _check_tokens(tokens: Sequence[int], samples: Sequence[Asked], vocabulary: int) -> None:
    unknown = {token for token in tokens if token >= vocabulary}
    for sample in samples:
        unknown.difference_update(sample.answer.tokens)
    if unknown:
        raise EpisodeMistake(
            f"observation_tokens contain the unknown ids {sorted(unknown)[:3]}; "
            f"the tokenizer's largest id is {vocabulary - 1}"
        )


def _check_ranges(ranges: Sequence[Sequence[int]], length: int) -> None:
    """Raise EpisodeMistake if ranges overlap, exceed `length` tokens, or start at token 0."""
    edges = list(chain.from_iterable(ranges))
    if edges != sorted(edges) or edges[-1] > length:
        raise EpisodeMistake(
            f"action_ranges must be sorted and within {length} tokens, not {shown(ranges)}"
        )
    if edges[0] == 0:
        raise EpisodeMistake(
            f"action_ranges start at token 0: {shown(ranges)}. The policy cannot sample the first "
            "token, because nothing precedes it. Positions are counted from the beginning of "
            "observation_tokens, which includes the prompt"
        )


def _numbers(name: str, given: Any, count: int, of: str) -> list[float] | None:
    """Return `given` as one number per token or range, or None if it is None."""
    if given is None:
        return None
    try:
        return numbers(name, given, count, of=of, finite=True)
    except (ValueError, OverflowError) as error:
        raise EpisodeMistake(f"execute or step {error}") from error


def _reward(result: Mapping[str, Any], turn_rewards: Sequence[float] | None) -> RewardResult:
    """Return the episode's reward, which defaults to the sum of its turn rewards.

    If the result has neither a reward nor turn rewards, a reward model scores the episode.
    """
    reward = result.get("reward")
    if reward is None and turn_rewards:
        reward = math.fsum(turn_rewards)
    try:
        if reward is None:
            [unscored] = read_rewards({"rewards": 0.0, "extra_logs": result.get("extra_logs")}, 1)
            return RewardResult(extra_logs=unscored.extra_logs)
        return read_rewards({**result, "rewards": reward}, 1)[0]
    except (ValueError, OverflowError) as error:
        raise EpisodeMistake(f"execute or step {error}") from error
