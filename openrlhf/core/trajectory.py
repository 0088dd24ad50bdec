"""The list world of rollouts: what a prompt is, and what one finished episode looks like.

Everything here is plain Python, pickles small, and is importable without torch: agents, user
processes and engines exchange these objects. `Experience` turns a batch of them into tensors.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Self, cast


class StopReason(StrEnum):
    """Why an episode ended."""

    # The policy ended it with an end token, stop token or stop string, or the environment was done.
    STOP = "stop"
    # The token budget was used up: counted as truncated.
    LENGTH = "length"
    # Engine, reward or agent failed: carries an error and no reward, and is never trained on.
    FAILED = "failed"


class Failure(StrEnum):
    """The kind of a failure, in one word; counted as `train/failed_<word>`."""

    TIMEOUT = "timeout"  # there was no result in time
    EXCEPTION = "exception"  # user code raised
    EXIT = "exit"  # user code ended its process
    MEMORY = "memory"  # user code exceeded its memory limit
    KILLED = "killed"  # a signal ended the process of user code
    RESULT = "result"  # user code returned something that is no reward
    SERVER = "server"  # a reward server, or a remote engine, did not answer
    ENGINE = "engine"  # the engine gave up on the sample


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One row of the prompt dataset as drawn in a run. Created by `data.prompts`, consumed by the
    rollout generator.

    `index` is the running number of the draw, not of the row. It seeds the samples and orders the
    batch.
    """

    index: int
    text: str
    tokens: list[int]  # of the whole text
    label: Any = ""  # the value of the row, unchanged
    datasource: str = "default"  # names evaluation metrics
    images: Any = None


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One finished episode. Created by the generator or an agent, consumed by the experience maker.
    Per-token lists have length T.

    Example, prompt `2+2=` and the sampled answer `4<eos>` (ids made up):

        tokens           [7, 9, 7, 3,    5,    1]
        action_mask      [F, F, F, F,    T,    T]
        rollout_logprobs [0, 0, 0, 0, -0.1, -0.2]  log-probability *of* the token at that position
    """

    tokens: Sequence[int]
    action_mask: Sequence[bool]  # True if the policy sampled the token
    rollout_logprobs: Sequence[float]  # 0.0 where action_mask is False; nats
    prompt: Prompt
    sample_index: int  # which of the prompt's samples
    stop_reason: StopReason
    reward: float | None = None  # None: a reward worker scores it
    score: float | None = (
        None  # read by dynamic filtering and pass@k; the reward if the user gives no score
    )
    weight_versions: tuple[int, ...] = ()  # the versions that sampled the tokens, oldest first
    extra_logs: Mapping[str, float] = field(default_factory=dict[str, float])
    response_text: str = ""
    error: str | None = None
    failure: Failure | None = None  # the kind of the error
    turn_rewards: tuple[
        tuple[int, float], ...
    ] = ()  # parts of the reward: position of a turn's last token, amount
    # Columns of the batch that are computed already, by name; length T. The controller adds them.
    columns: Mapping[str, Sequence[float]] = field(default_factory=dict[str, Sequence[float]])
    filtered: bool = False  # dynamic filtering rejected the prompt: shown, never trained on
    turns: int | None = (
        None  # of an agent's episode: how often the policy was asked, in all conversations
    )
    # The conversations of an agent before the last one, which is this object's. They share its
    # reward.
    earlier: "tuple[Trajectory, ...]" = ()

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.action_mask) == len(self.rollout_logprobs), (
            "lists of different lengths"
        )
        if any(self.action_mask[:1]):
            raise ValueError(
                "the first token of a trajectory was sampled from nothing: its prompt has no tokens"
            )

    def failing(self, error: str | None, failure: Failure | None) -> Self:
        """The same episode as a failed one: with the error, without reward and score."""
        return replace(
            self,
            stop_reason=StopReason.FAILED,
            reward=None,
            score=None,
            error=error,
            failure=failure,
        )

    def packed(self) -> Self:
        """The same episode, its per-token columns in arrays, which take a tenth of the memory of
        lists.
        """
        return replace(
            self,
            tokens=array("i", self.tokens),
            action_mask=cast(Sequence[bool], array("b", self.action_mask)),
            rollout_logprobs=array("f", self.rollout_logprobs),
            columns={name: array("f", column) for name, column in self.columns.items()},
            earlier=tuple(conversation.packed() for conversation in self.earlier),
        )

    @property
    def conversations(self) -> "tuple[Trajectory, ...]":
        """The token sequences of the episode, in order: more than one if an agent opened a new
        conversation.
        """
        return (*self.earlier, self)

    @property
    def failed(self) -> bool:
        """Whether the episode failed, so that it is never trained on."""
        return self.stop_reason is StopReason.FAILED

    @property
    def truncated(self) -> bool:
        """Whether the token budget ended the episode."""
        return self.stop_reason is StopReason.LENGTH

    @property
    def num_actions(self) -> int:
        """Number of sampled tokens, in all conversations."""
        return sum(sum(conversation.action_mask) for conversation in self.conversations)


class TrajectoryBuilder:
    """Grows an episode piece by piece and keeps the three lists aligned."""

    def __init__(self, prompt_tokens: Sequence[int]) -> None:
        self.tokens: list[int] = list(prompt_tokens)
        self.action_mask: list[bool] = [False] * len(self.tokens)
        self.rollout_logprobs: list[float] = [0.0] * len(self.tokens)
        self.weight_versions: list[int] = []

    def append_action(
        self, tokens: Sequence[int], logprobs: Sequence[float], versions: Sequence[int] = ()
    ) -> None:
        """Append sampled tokens, with their log-probabilities and the weight versions that sampled
        them.
        """
        assert len(tokens) == len(logprobs)
        self.tokens += tokens
        self.action_mask += [True] * len(tokens)
        self.rollout_logprobs += logprobs
        self.weight_versions += [v for v in versions if v not in self.weight_versions]

    def append_feedback(self, tokens: Sequence[int]) -> None:
        """Append tokens that the environment wrote: context for the policy, never trained on."""
        self.tokens += tokens
        self.action_mask += [False] * len(tokens)
        self.rollout_logprobs += [0.0] * len(tokens)

    def cut(self, length: int) -> None:
        """Drop all but the first `length` tokens."""
        for column in (self.tokens, self.action_mask, self.rollout_logprobs):
            del column[length:]

    def finish(self, **fields: Any) -> Trajectory:
        """The finished `Trajectory`; `fields` are the fields that the builder does not know."""
        return Trajectory(
            tokens=self.tokens,
            action_mask=self.action_mask,
            rollout_logprobs=self.rollout_logprobs,
            weight_versions=tuple(self.weight_versions),
            **fields,
        )
