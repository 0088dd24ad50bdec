"""A teacher model served by vLLM.

The server returns the log-probabilities of the prompt's tokens, and of the most likely tokens at
each position.
"""

import asyncio
import math
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from itertools import chain
from typing import Any, Self

import torch
from transformers import PreTrainedTokenizerBase

from openrlhf.config.flags import UserError
from openrlhf.config.options import ConfigError
from openrlhf.core.trajectory import Trajectory
from openrlhf.data.errors import DataError
from openrlhf.reporting import warn
from openrlhf.rewards.remote_engines import RemoteEngine, in_background, remote_engine
from openrlhf.rewards.servers import ServerError
from openrlhf.trainers.stages import Add, EpisodeRows

PROBED = 64  # number of tokens to compare, spread over the vocabulary
UNREADABLE = "\ufffd"  # replacement character, for tokens that hold only part of a character


@dataclass(eq=False, repr=False)
class RemoteTeacher:
    """A teacher on a vLLM server, scored with `prompt_logprobs` at temperature 1.

    `flag` is the flag that names the teacher, including its value. `best` is the number of most
    likely tokens to request for each position.
    """

    flag: str
    engine: RemoteEngine
    best: int = 0

    def likeliest(self, rows: Sequence[list[int]]) -> list[list[list[tuple[float, int]]]]:
        """Return, for each row, the most likely tokens at every position except the first.

        Each entry consists of a log-probability (nats) and a token id. Raises UserError if the
        server does not answer.
        """
        pending = [in_background(self._likeliest(tokens)) for tokens in rows]
        try:
            return [answer.result() for answer in pending]
        except ServerError as error:
            raise UserError(f"{self.flag}: {error}") from error

    async def _likeliest(self, tokens: Sequence[int]) -> list[list[tuple[float, int]]]:
        places: list[list[tuple[float, int]]] = []
        for entry in await self._entries(tokens):
            best = [token for token in entry if entry[token].get("rank", 0) <= self.best]
            places.append([(entry[token]["logprob"], int(token)) for token in best])
        return places

    @classmethod
    def named(cls, name: str) -> Self:
        """Return the teacher on the remote engine called `name` (--algo.distill.teacher)."""
        return cls(f"--algo.distill.teacher {name}", remote_engine(name))

    async def scores(self, episode: Trajectory) -> list[float]:
        """Return the log-probability (nats) of each token in all conversations of the episode."""
        asked = [self._logprobs(conversation.tokens) for conversation in episode.conversations]
        return list(chain.from_iterable(await asyncio.gather(*asked)))

    async def _logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Return the log-probability (nats) of each token, with 0.0 for the first token."""
        judged = await self._judged(tokens)
        logprobs = [self.engine.read(entry, "logprob", kind=float) for entry in judged]
        if not all(map(math.isfinite, logprobs)):
            raise ServerError(f"some log-probabilities are not finite: {logprobs}")
        return [0.0, *logprobs]

    async def _judged(self, tokens: Sequence[int]) -> list[dict[str, Any]]:
        """Return the server's entry for each token except the first token."""
        entries = zip(await self._entries(tokens), tokens[1:], strict=True)
        return [self.engine.read(entry, str(token), kind=dict) for entry, token in entries]

    async def _entries(self, tokens: Sequence[int]) -> list[dict[str, Any]]:
        """Return the server's entries for each position except the first position.

        Each entry maps the ids of the prompt's own token and of the most likely tokens to their
        scores.
        """
        wanted = {"prompt": list(tokens), "prompt_logprobs": self.best, "max_tokens": 1}
        answered = await self.engine.ask("/completions", wanted)
        listed = self.engine.read(answered, "choices", 0, "prompt_logprobs", kind=list)
        return [self.engine.read(listed, place, kind=dict) for place in range(1, len(tokens))]

    def check(self, tokenizer: PreTrainedTokenizerBase, *, max_len: int) -> None:
        """Check that the teacher accepts `max_len` tokens and has the policy's vocabulary.

        The server returns the text of a token only if it receives that token, so the check compares
        a sample of the vocabulary. Raises ConfigError if the server cannot be used as a teacher,
        and DataError if its vocabulary differs.
        """
        try:
            room = in_background(self.engine.room()).result()
            probe = probed_tokens(len(tokenizer), max_len)
            judged = in_background(self._judged(probe)).result()
        except ServerError as error:
            raise ConfigError(
                f"{self.flag} cannot be used as a teacher. It must be a vLLM server with the "
                f"policy's vocabulary. {error}"
            ) from error
        if room is not None and room <= max_len:
            raise ConfigError(
                f"{self.flag} accepts {room} tokens including one generated token, too few for "
                f"--data.max_len {max_len}. Start the server with a larger --max-model-len."
            )
        for token, entry in zip(probe[1:], judged, strict=True):
            theirs = entry.get("decoded_token")
            if theirs is None:
                warn(
                    f"{self.flag} does not return token texts, so its vocabulary was not checked. "
                    "Make sure that it is the policy's vocabulary."
                )
                return
            ours = tokenizer.decode([token])
            if UNREADABLE in ours + theirs:
                continue
            if theirs not in (ours, tokenizer.convert_ids_to_tokens(token)):
                raise DataError(
                    f"{self.flag} has a different vocabulary from the policy's: token {token} is "
                    f"{theirs!r} on the server and {ours!r} here. Serve a model with the policy's "
                    "tokenizer."
                )


@dataclass(frozen=True)
class RemoteTeacherStage:
    """Log-probabilities from a served teacher (--algo.distill.teacher).

    An episode fails if its request fails. All requests of a batch share one deadline; pending
    requests are cancelled at the deadline.
    """

    by: RemoteTeacher
    writes: str = "teacher_logprobs"

    def launch(self, batch: EpisodeRows) -> Add:
        """Send the requests for all episodes concurrently."""
        answers: list[Future[list[float]]] = []
        for episode in batch.episodes:
            answers.append(in_background(self.by.scores(episode)))

        def add(batch: EpisodeRows, timeout_s: float) -> EpisodeRows:
            _, late = wait(answers, timeout_s)
            episodes: list[Trajectory] = []
            column: list[float] = []
            for episode, answer in zip(batch.episodes, answers, strict=True):
                try:
                    if answer in late:
                        answer.cancel()
                        raise ServerError(
                            f"no answer within {timeout_s:g} s (--train.step_timeout)"
                        )
                    column += answer.result()
                    episodes.append(episode)
                except ServerError as error:
                    message = f"{self.by.flag}: {error}"
                    episodes.append(episode.failing(message, error.failure))
                    size = sum(len(conversation.tokens) for conversation in episode.conversations)
                    column += [math.nan] * size
            batch = EpisodeRows(episodes, batch.rows)
            return batch.with_column(self.writes, torch.tensor(column))

        return add


def probed_tokens(vocabulary: int, max_len: int) -> list[int]:
    """Return at most `max_len` token ids, spread over a vocabulary of `vocabulary` tokens."""
    spread = torch.linspace(0, vocabulary - 1, min(PROBED, max_len))
    return spread.round().long().unique().tolist()
