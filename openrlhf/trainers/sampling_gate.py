"""A gate that keeps samples from starting while weights are published."""

import asyncio

from openrlhf import termination
from openrlhf.core.trajectory import Prompt

TERMINATION_CHECK_S = 0.2  # seconds between termination checks while a publication waits


class SamplingGate:
    """Counts the prompts whose tokens are being sampled, and closes for a publication.

    All methods run in the event loop. With `lets_samples_run` (--train.partial_rollout_enable),
    samples in progress continue with the new weights. Otherwise, closing the gate waits until their
    last tokens have been sampled.
    """

    def __init__(self, *, lets_samples_run: bool) -> None:
        self.lets_samples_run = lets_samples_run
        self.is_closed = False
        # Maps a prompt's index to a future that completes when the prompt's last token has been
        # sampled.
        self._sampling: dict[int, asyncio.Future[None]] = {}

    def enter(self, prompt: Prompt) -> None:
        """Record that the engines start sampling tokens for a prompt."""
        self._sampling[prompt.index] = asyncio.get_running_loop().create_future()

    def leave(self, prompt: Prompt) -> None:
        """Record that the engines have sampled all tokens for a prompt. Idempotent."""
        under_way = self._sampling.pop(prompt.index, None)
        if under_way:
            under_way.set_result(None)

    async def close(self) -> bool:
        """Keep new prompts from starting, and return whether weights may be published.

        Returns False if the process is asked to terminate while samples are still in progress.
        """
        self.is_closed = True
        if self.lets_samples_run:
            return True
        while self._sampling and not termination.asked():
            await asyncio.wait(self._sampling.values(), timeout=TERMINATION_CHECK_S)
        return not self._sampling

    def open(self) -> None:
        """Let prompts start again."""
        self.is_closed = False
