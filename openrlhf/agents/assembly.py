"""Conversion of an executor's result into an episode for training.

The result is validated, and its token ids are matched with the engine's samples.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openrlhf.core.trajectory import Failure, TrajectoryBuilder
from openrlhf.isolation.call import Asked, UserCodeError
from openrlhf.rewards.protocol import RewardResult, numbers, read_rewards, shown
from openrlhf.rollout.sampling import Generation

FINISHED = {"stop", "length", "abort"}  # finish reasons of samples that can be trained on


class EpisodeMistake(UserCodeError):
    """An error for an executor's result that is no valid episode. The message shows the value."""

    def __init__(self, message: str) -> None:
        super().__init__(message, Failure.RESULT)


@dataclass(frozen=True, kw_only=True)
class Assembled:
    """An episode: its tokens, and the agent's reward, logs and notices."""

    builder: TrajectoryBuilder
    reward: RewardResult
    truncated: bool
    turns: int
    earlier: Sequence[TrajectoryBuilder] = ()  # the episode's conversations before the last one
    # one (position of the turn's last token, reward of the turn) for each rewarded turn
    turn_rewards: tuple[tuple[int, float], ...] = ()
    notices: Mapping[str, str]  # messages for the user, keyed by kind of notice


@dataclass(frozen=True, kw_only=True)
class _Conversation:
    """A conversation's tokens, truncated to the maximum length."""

    builder: TrajectoryBuilder
    ranges: list[tuple[int, int]]  # action ranges before truncation
    truncated: bool


def assemble(
    result: Mapping[str, Any], asked: Sequence[Asked], max_length: int, *, vocabulary: int
) -> Assembled:
    """Convert an executor's result to an episode, truncated to `max_length` tokens.

    `asked` holds the episode's requests to the engine. Sampled tokens get the log-probabilities and
    weight versions that the engine returned with them. The executor's own `rollout_log_probs` are
    used only for tokens that the engine did not sample. Raises EpisodeMistake for an invalid
    result, and UserCodeError for a sample that the engine could not finish.
    """
    samples = _Samples(asked)
    earlier: list[TrajectoryBuilder] = []
    turns = 0
    for entry in _earlier(result):
        conversation = _build(entry, samples, max_length, vocabulary)
        turns += len(conversation.ranges)
        if any(conversation.builder.action_mask):
            earlier.append(conversation.builder)
    last = _build(result, samples, max_length, vocabulary)
    turn_rewards = _numbers(result, "turn_rewards", len(last.ranges), "action ranges")
    rewarded: list[tuple[int, float]] = []
    for (start, end), amount in zip(last.ranges, turn_rewards or (), strict=False):
        if end > start:
            rewarded.append((min(end, max_length) - 1, amount))
    if earlier:
        versions = set(last.builder.weight_versions)
        for builder in earlier:
            versions.update(builder.weight_versions)
        last.builder.weight_versions = sorted(versions)
    return Assembled(
        builder=last.builder,
        reward=_reward(result, turn_rewards),
        truncated=bool(result.get("truncated")) or last.truncated,
        turns=turns + len(last.ranges),
        earlier=earlier,
        turn_rewards=tuple(rewarded),
        notices=_notices(result) | samples.notices,
    )


def _build(
    entry: Mapping[str, Any], samples: "_Samples", max_length: int, vocabulary: int
) -> _Conversation:
    """Build a conversation from a dict with `observation_tokens` and `action_ranges`."""
    tokens = _tokens(entry, samples.unused, vocabulary)
    ranges = _ranges(entry, len(tokens))
    given = _numbers(entry, "rollout_log_probs", len(tokens), "tokens")
    first_action, _ = ranges[0]
    builder = TrajectoryBuilder(tokens[:first_action])
    for start, end in ranges:
        builder.append_feedback(tokens[len(builder.tokens) : start])
        samples.append_action(builder, tokens, end, given)
    builder.append_feedback(tokens[len(builder.tokens) :])
    builder.cut(max_length)
    return _Conversation(builder=builder, ranges=ranges, truncated=len(tokens) > max_length)


def _earlier(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the episode's conversations before the last one."""
    given = result.get("earlier") or []
    if not isinstance(given, list) or not all(isinstance(entry, Mapping) for entry in given):
        raise EpisodeMistake(
            "earlier must be a list of dicts with observation_tokens and action_ranges, "
            f"not {shown(given)}"
        )
    return given


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
        """Return the longest sample that matches the tokens at `start`; remove it from `unused`.

        Samples whose prompt equals the tokens before `start` are preferred. If a sample may belong
        to another episode, it is used only if its prompt is equal.
        """
        span = tokens[start:end]
        exact: list[Asked] = []
        fitting: list[Asked] = []
        for request in self.unused:
            sampled = request.answer.tokens
            if sampled[: len(span)] != span[: len(sampled)]:
                continue
            if request.question["prompt"] == tokens[:start]:
                exact.append(request)
            elif request.own:
                fitting.append(request)
        if not exact:
            if not fitting:
                return None
            self.notices["other context"] = (
                "the tokens before an action in observation_tokens differ from the prompt from "
                "which the engine sampled it, so its log-probabilities are not the policy's"
            )
        chosen = max(
            exact or fitting,
            key=lambda request: (request.own, min(len(request.answer.tokens), len(span))),
        )
        self.unused.remove(chosen)
        sample: Generation = chosen.answer
        if sample.finish_reason not in FINISHED:
            raise UserCodeError(
                f"a sample failed in the engine: {sample.finish_reason}", Failure.ENGINE
            )
        return sample


def _tokens(entry: Mapping[str, Any], samples: Sequence[Asked], vocabulary: int) -> list[int]:
    tokens = entry.get("observation_tokens")
    is_list = isinstance(tokens, list)
    if not is_list or not tokens or not all(type(t) is int and t >= 0 for t in tokens):
        raise EpisodeMistake(f"observation_tokens must be a list of token ids, not {shown(tokens)}")
    unknown = {token for token in tokens if token >= vocabulary}
    for sample in samples:
        unknown.difference_update(sample.answer.tokens)
    if unknown:
        raise EpisodeMistake(
            f"observation_tokens contain the unknown ids {sorted(unknown)[:3]}; "
            f"the tokenizer's largest id is {vocabulary - 1}"
        )
    return tokens


def _ranges(entry: Mapping[str, Any], length: int) -> list[tuple[int, int]]:
    """Return the action ranges. Raises EpisodeMistake if they overlap or exceed `length` tokens."""
    given = entry.get("action_ranges")
    if not isinstance(given, list) or not given or not all(map(_is_range, given)):
        raise EpisodeMistake(
            f"action_ranges must be a non-empty list of [start, end) pairs, not {shown(given)}"
        )
    ranges: list[tuple[int, int]] = []
    previous_end = 0
    for start, end in given:
        if not previous_end <= start <= end <= length:
            raise EpisodeMistake(
                f"action_ranges must be sorted and within {length} tokens, not {shown(given)}"
            )
        ranges.append((start, end))
        previous_end = end
    if ranges[0][0] == 0:
        raise EpisodeMistake(
            f"action_ranges start at token 0: {shown(given)}. The policy cannot sample the first "
            "token, because nothing precedes it. Positions are counted from the beginning of "
            "observation_tokens, which include the prompt"
        )
    return ranges


def _is_range(pair: Any) -> bool:
    if not isinstance(pair, list) or len(pair) != 2:
        return False
    return all(type(edge) is int for edge in pair)


def _numbers(entry: Mapping[str, Any], name: str, count: int, of: str) -> list[float] | None:
    """Return the entry `name`, one number per token or range, or None if it is missing."""
    if entry.get(name) is None:
        return None
    try:
        return numbers(name, entry[name], count, of=of, finite=True)
    except (ValueError, OverflowError) as error:
        raise EpisodeMistake(f"execute or step {error}") from error


def _notices(result: Mapping[str, Any]) -> dict[str, str]:
    """Return the notices from our own executors.

    A user's executor may use the key `notices` for something else.
    """
    given = result.get("notices")
    if not isinstance(given, Mapping):
        return {}
    return {str(kind): str(sentence) for kind, sentence in given.items()}


def _reward(result: Mapping[str, Any], turn_rewards: Sequence[float] | None) -> RewardResult:
    """Return the episode's reward, which defaults to the sum of its turn rewards.

    Without either, the result has no reward, and a reward model scores the episode.
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
