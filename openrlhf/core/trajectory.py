"""Prompts and episodes as plain Python lists.

Agents, user processes and engines exchange these objects, so they pickle small and import without
torch. `Experience.from_trajectories` turns a batch of episodes into tensors.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Self, cast


class StopReason(StrEnum):
    """Why an episode ended."""

    # The policy sampled an end token, stop token or stop string, or the environment was done.
    STOP = "stop"
    # The token budget ran out. Counted as truncated.
    LENGTH = "length"
    # Engine, reward or agent failed. The episode has an error and no reward, and is not trained on.
    FAILED = "failed"


class Failure(StrEnum):
    """The kind of a failure. Counted in the metric `train/failed_<kind>`."""

    TIMEOUT = "timeout"  # no result in time
    EXCEPTION = "exception"  # user code raised an exception
    EXIT = "exit"  # user code ended its process
    MEMORY = "memory"  # user code exceeded its memory limit
    KILLED = "killed"  # a signal ended the process of user code
    RESULT = "result"  # user code returned something that is not a reward
    SERVER = "server"  # a reward server or remote engine did not answer
    ENGINE = "engine"  # the engine gave up on the sample


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One draw of a row of the prompt dataset.

    Created by `data.prompts`, consumed by the rollout generator.
    """

    # Running number of the draw, not of the row. Seeds the samples and orders the batch.
    index: int
    text: str
    tokens: list[int]  # tokens of the whole text
    label: Any = ""  # value in the dataset, unchanged
    datasource: str = "default"  # part of the names of evaluation metrics
    images: Any = None


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One finished episode. Its per-token lists have length T.

    Created by the generator or an agent, consumed by the experience maker. Example, prompt `2+2=`
    and the sampled answer `4<eos>` (ids made up):

        tokens           [7, 9, 7, 3,    5,    1]
        action_mask      [F, F, F, F,    T,    T]
        rollout_logprobs [0, 0, 0, 0, -0.1, -0.2]  log-probability *of* the token at that position

    Raises ValueError if the first token is an action: no prompt token comes before it.
    """

    tokens: Sequence[int]
    action_mask: Sequence[bool]  # True if the policy sampled the token
    rollout_logprobs: Sequence[float]  # nats; 0.0 where action_mask is False
    prompt: Prompt
    sample_index: int  # number of the sample among those of its prompt
    stop_reason: StopReason
    reward: float | None = None  # None until a reward worker has scored the episode
    # Read by dynamic filtering and pass@k. The reward, unless the user returns a score too.
    score: float | None = None
    weight_versions: tuple[int, ...] = ()  # versions that sampled the tokens, oldest first
    extra_logs: Mapping[str, float] = field(default_factory=dict[str, float])
    response_text: str = ""
    error: str | None = None
    failure: Failure | None = None  # kind of the error
    # Parts of the reward: (position of a turn's last token, amount).
    turn_rewards: tuple[tuple[int, float], ...] = ()
    # Batch columns that are computed already: name → (T,) tensor, or a list that was read from a
    # file. Added by the controller.
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])
    filtered: bool = False  # True if dynamic filtering rejected the prompt: logged, not trained on
    turns: int | None = None  # policy calls of an agent's episode, in all conversations
    # Conversations of an agent before the last one, which is this object. They share its reward.
    earlier: "tuple[Trajectory, ...]" = ()

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.action_mask) == len(self.rollout_logprobs), (
            "tokens, action_mask and rollout_logprobs have different lengths"
        )
        if any(self.action_mask[:1]):
            raise ValueError("the first token of an episode is an action: its prompt has no tokens")

    def failing(self, error: str | None, failure: Failure | None) -> Self:
        """Return the episode marked as failed: with the error, without reward and score."""
        return replace(
            self,
            stop_reason=StopReason.FAILED,
            reward=None,
            score=None,
            error=error,
            failure=failure,
        )

    def packed(self) -> Self:
        """Return the same episode with arrays for its per-token lists: a tenth of the memory."""
        return replace(
            self,
            tokens=array("i", self.tokens),
            action_mask=cast(Sequence[bool], array("b", self.action_mask)),
            rollout_logprobs=array("f", self.rollout_logprobs),
            earlier=tuple(conversation.packed() for conversation in self.earlier),
        )

    @property
    def conversations(self) -> "tuple[Trajectory, ...]":
        """The token sequences of the episode, in order.

        There are several if an agent opened a new conversation.
        """
        return (*self.earlier, self)

    @property
    def failed(self) -> bool:
        """True if the episode failed. Failed episodes are not trained on."""
        return self.stop_reason is StopReason.FAILED

    @property
    def truncated(self) -> bool:
        """True if the token budget ended the episode."""
        return self.stop_reason is StopReason.LENGTH

    @property
    def num_actions(self) -> int:
        """The number of sampled tokens in all conversations."""
        return sum(sum(conversation.action_mask) for conversation in self.conversations)


class TrajectoryBuilder:
    """An episode in the making, whose three per-token lists stay aligned."""

    def __init__(self, prompt_tokens: Sequence[int]) -> None:
        self.tokens: list[int] = list(prompt_tokens)
        self.action_mask: list[bool] = [False] * len(self.tokens)
        self.rollout_logprobs: list[float] = [0.0] * len(self.tokens)
        self.weight_versions: list[int] = []

    def append_action(
        self, tokens: Sequence[int], logprobs: Sequence[float], versions: Sequence[int] = ()
    ) -> None:
        """Append sampled tokens, their log-probabilities, and their weight versions."""
        assert len(tokens) == len(logprobs)
        self.tokens += tokens
        self.action_mask += [True] * len(tokens)
        self.rollout_logprobs += logprobs
        for version in versions:
            if version not in self.weight_versions:
                self.weight_versions.append(version)

    def append_feedback(self, tokens: Sequence[int]) -> None:
        """Append tokens that the environment wrote: context for the policy, not trained on."""
        self.tokens += tokens
        self.action_mask += [False] * len(tokens)
        self.rollout_logprobs += [0.0] * len(tokens)

    def cut(self, length: int) -> None:
        """Drop all but the first `length` tokens."""
        for column in (self.tokens, self.action_mask, self.rollout_logprobs):
            del column[length:]

    def finish(self, **fields: Any) -> Trajectory:
        """Return the finished episode. `fields` are the fields that the builder does not hold."""
        return Trajectory(
            tokens=self.tokens,
            action_mask=self.action_mask,
            rollout_logprobs=self.rollout_logprobs,
            weight_versions=tuple(self.weight_versions),
            **fields,
        )
