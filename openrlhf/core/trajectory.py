"""Prompts and episodes as plain Python lists.

Agents, user processes and engines exchange these objects, so they are small when pickled and do not
import torch. `Experience.from_trajectories` turns a batch of episodes into tensors.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Self, cast


class StopReason(StrEnum):
    """The reason why an episode ended."""

    # An end-of-turn token, a stop token, a stop string or the environment ended the episode.
    STOP = "stop"
    # The token budget ran out. The episode counts as truncated.
    LENGTH = "length"
    # The engine, reward or agent failed.
    # The episode has an error and no reward, and is not used for training.
    FAILED = "failed"


class Failure(StrEnum):
    """The kind of a failure, counted in the metric `train/failed_<kind>`."""

    TIMEOUT = "timeout"  # no result in time
    EXCEPTION = "exception"  # user code raised an exception
    EXIT = "exit"  # user code ended its process
    MEMORY = "memory"  # user code exceeded its memory limit
    KILLED = "killed"  # a signal ended the process of user code
    RESULT = "result"  # user code returned an invalid reward
    SERVER = "server"  # a reward server or remote engine did not respond
    ENGINE = "engine"  # the engine gave up on the sample


class Exclusion(StrEnum):
    """The reason why an episode of a batch is not trained on."""

    FAILED = "failed"
    FILTERED = "filtered"  # dynamic filtering rejected its prompt
    EMPTY = "empty"  # the policy sampled no token
    ALONE = "alone"  # no other sample of the same prompt is left to compare with


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt drawn from the prompt dataset.

    `data.prompts` creates prompts, and the rollout generator consumes them.
    """

    # Index in the sequence of drawn prompts, not in the dataset.
    # The index seeds the samples and determines their order in the batch.
    index: int
    text: str
    tokens: list[int]  # tokens of the entire text
    label: Any = ""  # value in the dataset, unchanged
    datasource: str = "default"  # part of evaluation metric names
    images: Any = None


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One finished episode. The per-token lists have length T.

    The generator or an agent creates trajectories, and the experience maker consumes them. Example
    with the prompt `2+2=` and the sampled answer `4<eos>` (made-up ids):

        tokens           [7, 9, 7, 3,    5,    1]
        action_mask      [F, F, F, F,    T,    T]
        rollout_logprobs [0, 0, 0, 0, -0.1, -0.2]  log-probability *of* the token at that position

    Raises ValueError if the first token is an action, because no prompt token precedes it.
    """

    tokens: Sequence[int]
    action_mask: Sequence[bool]  # True if the policy sampled the token
    rollout_logprobs: Sequence[float]  # nats; 0.0 where action_mask is False
    prompt: Prompt
    sample_index: int  # index of the sample among its prompt's samples
    stop_reason: StopReason
    reward: float | None = None  # None until a reward worker scores the episode
    # Dynamic filtering and pass@k use the score.
    # The score equals the reward unless the user also returns a score.
    score: float | None = None
    weight_versions: tuple[int, ...] = ()  # weight versions that sampled the tokens, oldest first
    extra_logs: Mapping[str, float] = field(default_factory=dict[str, float])
    response_text: str = ""
    error: str | None = None
    failure: Failure | None = None  # kind of the error
    # Parts of the reward: (position of a turn's last token, amount).
    turn_rewards: tuple[tuple[int, float], ...] = ()
    # Batch columns that are already computed: name → (T,) tensor, or a list read from a file.
    # The controller adds these columns.
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])
    filtered: bool = False  # True if dynamic filtering rejected the prompt: logged, not trained on
    turns: int | None = None  # number of policy calls in an agent's episode, over all conversations
    # An agent's earlier conversations, which share the episode's reward.
    # This object is the last conversation.
    earlier: "tuple[Trajectory, ...]" = ()

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.action_mask) == len(self.rollout_logprobs), (
            "tokens, action_mask and rollout_logprobs have different lengths"
        )
        if any(self.action_mask[:1]):
            raise ValueError(
                "the first token of an episode is an action, so its prompt has no tokens"
            )

    def failing(self, error: str | None, failure: Failure | None) -> Self:
        """Return the episode marked as failed, with the error and without a reward or score."""
        return replace(
            self,
            stop_reason=StopReason.FAILED,
            reward=None,
            score=None,
            error=error,
            failure=failure,
        )

    def packed(self) -> Self:
        """Return the same episode with arrays, which take a tenth of the memory of Python lists."""
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

        There are several sequences if an agent starts a new conversation.
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
    """An unfinished episode whose three per-token lists stay aligned."""

    def __init__(self, prompt_tokens: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self.action_mask: list[bool] = []
        self.rollout_logprobs: list[float] = []
        self.weight_versions: list[int] = []
        self.append_feedback(prompt_tokens)

    def append_action(
        self, tokens: Sequence[int], logprobs: Sequence[float], versions: Sequence[int] = ()
    ) -> None:
        """Append sampled tokens with their log-probabilities and weight versions."""
        assert len(tokens) == len(logprobs)
        self.tokens += tokens
        self.action_mask += [True] * len(tokens)
        self.rollout_logprobs += logprobs
        for version in versions:
            if version not in self.weight_versions:
                self.weight_versions.append(version)

    def append_feedback(self, tokens: Sequence[int]) -> None:
        """Append tokens that the environment wrote, which are context and are not trained on."""
        self.tokens += tokens
        self.action_mask += [False] * len(tokens)
        self.rollout_logprobs += [0.0] * len(tokens)

    def cut(self, length: int) -> None:
        """Drop all but the first `length` tokens."""
        for column in (self.tokens, self.action_mask, self.rollout_logprobs):
            del column[length:]

    def finish(self, **fields: Any) -> Trajectory:
        """Return the finished episode. `fields` are the fields that the builder does not track."""
        return Trajectory(
            tokens=self.tokens,
            action_mask=self.action_mask,
            rollout_logprobs=self.rollout_logprobs,
            weight_versions=tuple(self.weight_versions),
            **fields,
        )
