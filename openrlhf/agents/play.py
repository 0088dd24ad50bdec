"""Agents instead of single samples: every sample of a prompt is an episode that the user's agent plays."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from openrlhf.agents.assembly import Assembled, EpisodeMistake, assemble
from openrlhf.agents.pool import AgentPool, Call, Episode, EpisodeError
from openrlhf.processes.host import HostError
from openrlhf.rollout.generator import Generate, SamplingSpec
from openrlhf.rollout.sampling import Generation, SamplingParams
from openrlhf.trajectory import Failure, Prompt, StopReason, Trajectory, TrajectoryBuilder

logger = logging.getLogger(__name__)
FINISHED = {"stop", "length", "abort"}  # ends of samples that an agent may go on from


class AgentEpisodes:
    """Plays episodes in the hosts of `pool`. `needs_reward`: nothing scores later what an agent gave no reward."""

    def __init__(self, pool: AgentPool, tokenizer: PreTrainedTokenizerBase, *, needs_reward: bool) -> None:
        self.pool, self.tokenizer, self.needs_reward = pool, tokenizer, needs_reward
        self._told: set[str] = set()

    async def check(self) -> None:
        """Load the agent's file. Raises ConfigError with the traceback where that fails."""
        await self.pool.check()

    async def close(self) -> None:
        """End the hosts."""
        await self.pool.close()

    async def play(self, prompt: Prompt, spec: SamplingSpec, generate: Generate) -> list[Trajectory]:
        """An episode for each sample of the prompt."""
        episodes = enumerate(spec.agent_params_for(prompt))
        return list(await asyncio.gather(*(self._play(prompt, spec, generate, *each) for each in episodes)))

    async def _play(
        self, prompt: Prompt, spec: SamplingSpec, generate: Generate, sample: int, params: SamplingParams
    ) -> Trajectory:
        """One episode; a failed one where the agent raised, took too long, or returned what is none."""

        async def sampled(turn: int, tokens: list[int], asked: SamplingParams) -> Generation:
            seed = spec.seed_of(prompt, sample, turn) if asked.seed in (None, params.seed) else asked.seed
            return (await generate(prompt, spec, tokens, [replace(asked, seed=seed)]))[0]

        calls: Sequence[Call] = []
        try:
            result, calls = await self.pool.run(
                Episode(prompt=prompt.text, label=prompt.label, params=params, generate=sampled, images=prompt.images)
            )
            if bad := {call.generation.finish_reason for call in calls} - FINISHED:
                error = f"the engine ended a sample: {', '.join(bad)}"
                return self._failed(prompt, sample, calls, error, Failure.ENGINE)
            episode = assemble(result, calls, spec.max_len, vocabulary=len(self.tokenizer))
            if episode.reward.reward is None and self.needs_reward:
                raise EpisodeMistake("execute returned no reward, and there is no --reward.model_name_or_path")
        except HostError as error:
            calls = error.calls if isinstance(error, EpisodeError) else calls
            return self._failed(prompt, sample, calls, str(error), error.failure)
        except EpisodeMistake as mistake:
            return self._failed(prompt, sample, calls, f"the agent's {mistake}", Failure.RESULT)
        for oddity in episode.oddities:
            self._tell_once(f"The agent {oddity}: its log-probabilities there will not be the policy's.")
        return self._finished(prompt, sample, episode)

    def _finished(self, prompt: Prompt, sample: int, episode: Assembled) -> Trajectory:
        builder, reward = episode.builder, episode.reward
        first = builder.action_mask.index(True) if any(builder.action_mask) else len(builder.tokens)
        return builder.finish(
            prompt=prompt,
            sample_index=sample,
            stop_reason=StopReason.LENGTH if episode.truncated else StopReason.STOP,
            reward=reward.reward,
            score=reward.score,
            extra_logs=reward.extra_logs,
            turn_rewards=episode.turn_rewards,
            response_text=self._decode(builder.tokens[first:]),
        )

    def _failed(self, prompt: Prompt, sample: int, calls: Sequence[Call], error: str, failure: Failure) -> Trajectory:
        """What is shown of an episode that cannot be trained on: as far as its last sample."""
        builder = TrajectoryBuilder(calls[-1].prompt if calls else prompt.tokens)
        for call in calls[-1:]:
            builder.append_action(call.generation.tokens, call.generation.logprobs, call.generation.weight_versions)
        return builder.finish(
            prompt=prompt,
            sample_index=sample,
            stop_reason=StopReason.FAILED,
            response_text=self._decode(builder.tokens[len(prompt.tokens) :]),
            error=error,
            failure=failure,
        )

    def _decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False))

    def _tell_once(self, sentence: str) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            logger.warning("%s", sentence)
