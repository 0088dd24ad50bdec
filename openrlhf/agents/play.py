"""Agents instead of single samples: every sample of a prompt is an episode that the user's agent plays."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from openrlhf.agents.assembly import Assembled, EpisodeMistake, assemble
from openrlhf.agents.pool import AgentPool, Episode, EpisodeError, Sampled
from openrlhf.observability.once import warn_once
from openrlhf.rollout.generator import Generate, SamplingSpec
from openrlhf.rollout.sampling import Generation, SamplingParams
from openrlhf.trajectory import Failure, Prompt, StopReason, Trajectory, TrajectoryBuilder

FINISHED = {"stop", "length", "abort"}  # ends of samples that an agent may go on from


class AgentEpisodes:
    """Plays episodes in the processes of `pool`. `needs_reward`: no reward model scores an episode without a reward."""

    def __init__(self, pool: AgentPool, tokenizer: PreTrainedTokenizerBase, *, needs_reward: bool) -> None:
        self.pool, self.tokenizer, self.needs_reward = pool, tokenizer, needs_reward

    async def check(self) -> None:
        """Load the agent's file. Raises ConfigError with the traceback if that fails."""
        await self.pool.check()

    async def close(self) -> None:
        """End the processes."""
        await self.pool.close()

    async def play(self, prompt: Prompt, spec: SamplingSpec, generate: Generate) -> list[Trajectory]:
        """An episode for each sample of the prompt."""
        episodes = enumerate(spec.agent_params_for(prompt))
        return list(await asyncio.gather(*(self._play(prompt, spec, generate, *each) for each in episodes)))

    async def _play(
        self, prompt: Prompt, spec: SamplingSpec, generate: Generate, sample: int, params: SamplingParams
    ) -> Trajectory:
        """One episode; a failed one if the agent raised, took too long, or returned what is no episode."""

        async def sampled(turn: int, tokens: list[int], asked: SamplingParams) -> Generation:
            seed = spec.seed_of(prompt, sample, turn) if asked.seed in (None, params.seed) else asked.seed
            return (await generate(prompt, spec, tokens, [replace(asked, seed=seed)]))[0]

        samples: Sequence[Sampled] = []
        file = self.pool.settings.path
        try:
            result, samples = await self.pool.run(
                Episode(prompt=prompt.text, label=prompt.label, params=params, generate=sampled, images=prompt.images)
            )
            own = [each.generation.finish_reason for each in samples if each.own]
            if bad := set(own) - FINISHED:
                error = f"the engine ended a sample: {', '.join(bad)}"
                return self._failed(prompt, sample, samples, error, Failure.ENGINE)
            episode = assemble(result, samples, spec.max_len, vocabulary=len(self.tokenizer))
            if episode.reward.reward is None and self.needs_reward:
                raise EpisodeMistake("execute returned no reward, and there is no --reward.model_name_or_path")
        except EpisodeError as error:
            return self._failed(prompt, sample, error.samples, str(error), error.failure)
        except EpisodeMistake as mistake:
            return self._failed(prompt, sample, samples, f"the agent of {file}: {mistake}", Failure.RESULT)
        for oddity in episode.oddities:
            warn_once(f"The agent of {file} {oddity}: the log-probabilities of these tokens will not be the policy's.")
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

    def _failed(
        self, prompt: Prompt, sample: int, samples: Sequence[Sampled], error: str, failure: Failure
    ) -> Trajectory:
        """What is shown of an episode that cannot be trained on: all up to its last sample."""
        last = next((each for each in reversed(samples) if each.own), None)
        builder = TrajectoryBuilder(last.prompt if last else prompt.tokens)
        if last:
            generation = last.generation
            builder.append_action(generation.tokens, generation.logprobs, generation.weight_versions)
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
