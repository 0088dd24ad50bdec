"""A teacher behind a vLLM server, which returns log-probabilities of the tokens it is sent, and of
the likeliest in their places.
"""

import logging
import math
from collections.abc import Sequence
from typing import Any, Self

from transformers import PreTrainedTokenizerBase

from openrlhf.config.flags import UserError
from openrlhf.config.options import ConfigError
from openrlhf.core.trajectory import Trajectory
from openrlhf.data.errors import DataError
from openrlhf.rewards.remote_engines import RemoteEngine, in_background, remote_engine
from openrlhf.rewards.servers import ServerError
from openrlhf.trainers.stages import with_column

logger = logging.getLogger(__name__)

PROBED = 64  # tokens of the vocabulary, spread over it, whose texts are compared
UNREADABLE = "\ufffd"  # part of a character


class RemoteTeacher:
    """The teacher in a vLLM server, which has `prompt_logprobs`. The temperature is 1.

    `flag`: the flag that names it, with its value. `best`: how many of the likeliest tokens it is
    asked for.
    """

    def __init__(self, flag: str, engine: RemoteEngine, *, best: int = 0) -> None:
        self.flag, self.engine, self.best = flag, engine, best

    def likeliest(self, rows: Sequence[list[int]]) -> list[list[list[tuple[float, int]]]]:
        """Log-probability (nats) and id of the likeliest tokens in the place of every token but the
        first, by row.

        Raises UserError if the server does not answer.
        """

        async def of_row(tokens: list[int]) -> list[list[tuple[float, int]]]:
            return [
                [
                    (each["logprob"], int(token))
                    for token, each in entry.items()
                    if each.get("rank", 0) <= self.best
                ]
                for entry in await self._entries(tokens)
            ]

        try:
            return [
                answer.result() for answer in [in_background(of_row(tokens)) for tokens in rows]
            ]
        except ServerError as error:
            raise UserError(f"{self.flag}: {error}") from error

    @classmethod
    def named(cls, name: str) -> Self:
        """The teacher that --algo.distill.teacher names, one of the remote engines."""
        return cls(f"--algo.distill.teacher {name}", remote_engine(name))

    def annotated(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """The episodes, with log π_teacher if they are trained on. An episode without an answer has
        failed.
        """
        return [
            answer.result()
            for answer in [in_background(self._annotated(each)) for each in trajectories]
        ]

    async def _annotated(self, trajectory: Trajectory) -> Trajectory:
        if trajectory.failed or trajectory.filtered:
            return trajectory
        try:
            # nats; 0.0 for the first token
            scored = [
                await self._logprobs(conversation.tokens)
                for conversation in trajectory.conversations
            ]
            [annotated] = with_column([trajectory], "teacher_logprobs", scored)
            return annotated
        except ServerError as error:
            return trajectory.failing(f"{self.flag}: {error}", error.failure)

    async def _logprobs(self, tokens: Sequence[int]) -> list[float]:
        judged = await self._judged(tokens)
        logprobs = [self.engine.read(entry, "logprob", kind=float) for entry in judged]
        if not all(map(math.isfinite, logprobs)):
            raise ServerError(f"some log-probabilities are not finite: {logprobs}")
        return [0.0, *logprobs]

    async def _judged(self, tokens: Sequence[int]) -> list[dict[str, Any]]:
        """What the server says of every token but the first."""
        entries = await self._entries(tokens)
        return [
            self.engine.read(entry, str(token), kind=dict)
            for entry, token in zip(entries, tokens[1:], strict=True)
        ]

    async def _entries(self, tokens: Sequence[int]) -> list[dict[str, Any]]:
        """By token, what the server says of it and of the likeliest in the place of every token but
        the first.
        """
        wanted = {"prompt": list(tokens), "prompt_logprobs": self.best, "max_tokens": 1}
        answered = await self.engine.ask("/completions", wanted)
        listed = self.engine.read(answered, "choices", 0, "prompt_logprobs", kind=list)
        return [self.engine.read(listed, place, kind=dict) for place in range(1, len(tokens))]

    def check(self, tokenizer: PreTrainedTokenizerBase, *, max_len: int) -> None:
        """Raise ConfigError if the teacher cannot score episodes of `max_len` tokens, DataError for
        another vocabulary.

        A server returns only the texts of the tokens it is sent, so some tokens of the vocabulary
        are compared, not all.
        """
        try:
            room = in_background(self.engine.room()).result()
            spread = sorted({i * (len(tokenizer) - 1) // (PROBED - 1) for i in range(PROBED)})
            probe = spread[:: -(-len(spread) // max_len)]
            judged = in_background(self._judged(probe)).result()
        except ServerError as error:
            raise ConfigError(
                f"{self.flag} cannot teach: it must be a vLLM server with the policy's vocabulary. {error}"
            ) from error
        if room is not None and room <= max_len:
            raise ConfigError(
                f"{self.flag} takes {room} tokens, one of them generated, fewer than --data.max_len {max_len}: start the "
                "server with a larger --max-model-len."
            )
        for token, entry in zip(probe[1:], judged, strict=True):
            ours, theirs = tokenizer.decode([token]), entry.get("decoded_token")
            if theirs is None:
                logger.warning(
                    "%s does not return the texts of tokens: make sure that its vocabulary is the policy's.",
                    self.flag,
                )
                return
            if (
                theirs not in (ours, tokenizer.convert_ids_to_tokens(token))
                and UNREADABLE not in ours + theirs
            ):
                raise DataError(
                    f"{self.flag} has another vocabulary than the policy: token {token} is {theirs!r} there and "
                    f"{ours!r} here. Serve a model with the policy's tokenizer."
                )
