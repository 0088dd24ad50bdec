"""A teacher behind a vLLM server, which returns the log-probability of each token that the policy sampled."""

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from openrlhf.config.options import ConfigError
from openrlhf.data.errors import DataError
from openrlhf.rewards.remote_engines import in_background, remote_engine
from openrlhf.rewards.servers import ServerError
from openrlhf.trajectory import Trajectory

logger = logging.getLogger(__name__)

PROBED = 64  # tokens of the vocabulary, spread over it, whose texts are compared
UNREADABLE = "\ufffd"  # part of a character


class RemoteTeacher:
    """The teacher in the remote engine `name`, a vLLM server with `prompt_logprobs`. The temperature is 1."""

    def __init__(self, name: str) -> None:
        self.flag, self.engine = f"--algo.distill.teacher {name}", remote_engine(name)

    def annotated(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """The episodes, with log π_teacher if they are trained on. An episode without an answer has failed."""

        async def all_annotated() -> list[Trajectory]:
            return await asyncio.gather(*map(self._annotated, trajectories))

        return in_background(all_annotated()).result()

    async def _annotated(self, trajectory: Trajectory) -> Trajectory:
        if trajectory.failed or trajectory.filtered:
            return trajectory
        try:
            scored = {"teacher_logprobs": await self._logprobs(trajectory.tokens)}  # nats; 0.0 for the first token
            return replace(trajectory, columns={**trajectory.columns, **scored})
        except ServerError as error:
            return trajectory.failing(f"{self.flag}: {error}", error.failure)

    async def _logprobs(self, tokens: Sequence[int]) -> list[float]:
        judged = await self._judged(tokens)
        logprobs = [self.engine.read(entry, "logprob", kind=float) for entry in judged]
        if not all(map(math.isfinite, logprobs)):
            raise ServerError(f"some log-probabilities are not finite: {logprobs}")
        return [0.0, *logprobs]

    async def _judged(self, tokens: Sequence[int]) -> list[dict[str, Any]]:
        """The server's entry for every token but the first."""
        wanted = {"prompt": list(tokens), "prompt_logprobs": 0, "max_tokens": 1}
        answered = await self.engine.ask("/completions", wanted)
        listed = self.engine.read(answered, "choices", 0, "prompt_logprobs", kind=list)
        return [self.engine.read(listed, t, str(tokens[t]), kind=dict) for t in range(1, len(tokens))]

    def check(self, tokenizer: PreTrainedTokenizerBase, *, max_len: int) -> None:
        """Raise ConfigError if the teacher cannot score episodes of `max_len` tokens, DataError for another vocabulary.

        A server returns only the texts of the tokens it is sent, so some tokens of the vocabulary are compared, not
        all.
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
                    "%s does not return the texts of tokens: make sure that its vocabulary is the policy's.", self.flag
                )
                return
            if theirs not in (ours, tokenizer.convert_ids_to_tokens(token)) and UNREADABLE not in ours + theirs:
                raise DataError(
                    f"{self.flag} has another vocabulary than the policy: token {token} is {theirs!r} there and "
                    f"{ours!r} here. Serve a model with the policy's tokenizer."
                )
