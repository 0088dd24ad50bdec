"""Agents instead of single samples: every sample of a prompt is an episode that the user's agent
plays in a user process.
"""

import asyncio
import logging
import os
import pickle
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from openrlhf.agents.assembly import Assembled, EpisodeMistake, assemble, samples_in
from openrlhf.config.options import ConfigError
from openrlhf.config.rollout import RolloutConfig, RuleConfig
from openrlhf.core.trajectory import Prompt, StopReason, Trajectory, TrajectoryBuilder
from openrlhf.isolation.pool import Asked, ProcessPool, UserCall, UserCodeError, loading
from openrlhf.observability.once import warn_once
from openrlhf.rollout.engine import RequestRefused
from openrlhf.rollout.generator import Generate, SamplingSpec
from openrlhf.rollout.sampling import Generation, SamplingParams

logger = logging.getLogger(__name__)
EPISODES = 128  # of a process at a time; more wait outside, where no deadline runs
NEW_CONVERSATION = "\n\n[new conversation]\n"  # between texts, in samples.jsonl
GRACE_S = 5.0  # for a cancelled episode to end


class AgentEpisodes:
    """Plays episodes of at most `max_length` tokens in processes that load the agent's file, many
    episodes at once in each.

    Without `needs_reward`, reward models score the episodes that have no reward. `log_dir` gets
    what agents print, an `agent-<n>.log` or `agent-alone-<n>.log` per process; without it, the
    output goes to stderr.
    """

    def __init__(
        self,
        file: str,
        tokenizer: PreTrainedTokenizerBase,
        rollout: RolloutConfig,
        reward: RuleConfig,
        *,
        max_length: int,
        needs_reward: bool = True,
        log_dir: Path | None = None,
    ) -> None:
        self.file = os.path.abspath(file)
        self.tokenizer, self.rollout, self.needs_reward = tokenizer, rollout, needs_reward
        self.pool = ProcessPool(
            reward.workers,
            at_once=EPISODES,
            memory_gib=reward.memory_gib,
            grace=GRACE_S,
            log_dir=log_dir,
            name="agent",
        )
        self._told: set[str] = set()  # the kinds of notices that have been logged
        self._setup = loading(
            self.file, "openrlhf.agents.program:start",
            self.file, pickle.dumps(tokenizer), max_length, rollout.max_turns,
            seconds=rollout.step_timeout,
            limit="--rollout.step_timeout",
        )  # fmt: skip

    async def check(self) -> None:
        """Load the agent's file in one process. Raises ConfigError with the traceback if that
        fails.
        """
        try:
            await self.pool.run(self._setup, self._setup)
        except UserCodeError as error:
            raise ConfigError(f"--train.agent_func_path: {error}") from error

    def close(self) -> None:
        """Kill every process; running episodes end with an error."""
        self.pool.close()

    async def play(
        self, prompt: Prompt, spec: SamplingSpec, generate: Generate
    ) -> list[Trajectory]:
        """An episode for each sample of the prompt."""
        episodes = enumerate(spec.agent_params_for(prompt))
        return list(
            await asyncio.gather(*(self._play(prompt, spec, generate, *each) for each in episodes))
        )

    async def _play(
        self,
        prompt: Prompt,
        spec: SamplingSpec,
        generate: Generate,
        sample: int,
        params: SamplingParams,
    ) -> Trajectory:
        """One episode; a failed one if the agent raised, took too long, or returned what is no
        episode.
        """
        loop = asyncio.get_running_loop()

        async def answer(turn: int, question: dict[str, Any]) -> Generation | str:
            """A sample, or the reason why the engine refuses to give one."""
            asked = SamplingParams(**question["params"])
            seed = (
                spec.seed_of(prompt, sample, turn)
                if asked.seed in (None, params.seed)
                else asked.seed
            )
            try:
                return (
                    await generate(prompt, spec, question["prompt"], [replace(asked, seed=seed)])
                )[0]
            except RequestRefused as refused:
                return str(refused)

        call = UserCall(
            name=f"an episode of {self.file}",
            target="openrlhf.agents.program:play",
            args=(prompt.text, prompt.label, params, prompt.images),
            seconds=self.rollout.step_timeout,
            limit="--rollout.step_timeout, between two samples",
            total_seconds=self.rollout.episode_timeout,
            total_limit="--rollout.episode_timeout",
            answer=lambda *question: asyncio.wrap_future(
                asyncio.run_coroutine_threadsafe(answer(*question), loop)
            ),
        )
        try:
            result = await self.pool.run(call, self._setup)
            episode = assemble(
                result, samples_in(call.asked), spec.max_len, vocabulary=len(self.tokenizer)
            )
            if episode.reward.reward is None and self.needs_reward:
                raise EpisodeMistake(
                    "execute returned no reward, and there is no --reward.model_name_or_path"
                )
        except UserCodeError as error:
            return self._failed(prompt, sample, samples_in(call.asked), error)
        for oddity in episode.oddities:
            warn_once(
                f"The agent of {self.file} {oddity}: the log-probabilities of these tokens will not be the policy's."
            )
        self._tell(episode.notices)
        return self._finished(prompt, sample, episode)

    def _tell(self, notices: Mapping[str, str]) -> None:
        """Log the first notice of each kind."""
        for kind, sentence in notices.items():
            if kind not in self._told:
                self._told.add(kind)
                logger.warning("The agent of %s: %s.", self.file, sentence)

    def _finished(self, prompt: Prompt, sample: int, episode: Assembled) -> Trajectory:
        builder, reward = episode.builder, episode.reward
        first, *others = (*episode.earlier, builder)
        start = first.action_mask.index(True) if any(first.action_mask) else len(first.tokens)
        texts = [
            self._decode(first.tokens[start:]),
            *(self._decode(other.tokens) for other in others),
        ]
        earlier = [
            conversation.finish(prompt=prompt, sample_index=sample, stop_reason=StopReason.STOP)
            for conversation in episode.earlier
        ]
        return builder.finish(
            prompt=prompt,
            sample_index=sample,
            stop_reason=StopReason.LENGTH if episode.truncated else StopReason.STOP,
            reward=reward.reward,
            score=reward.score,
            extra_logs=reward.extra_logs,
            turn_rewards=episode.turn_rewards,
            response_text=NEW_CONVERSATION.join(texts),
            turns=episode.turns,
            earlier=tuple(earlier),
        )

    def _failed(
        self, prompt: Prompt, sample: int, samples: list[Asked], error: UserCodeError
    ) -> Trajectory:
        """What is shown of an episode that cannot be trained on: all tokens up to its last sample."""
        last = next((each for each in reversed(samples) if each.own), None)
        builder = TrajectoryBuilder(last.question["prompt"] if last else prompt.tokens)
        if last:
            generation: Generation = last.answer
            builder.append_action(
                generation.tokens, generation.logprobs, generation.weight_versions
            )
        return builder.finish(
            prompt=prompt,
            sample_index=sample,
            stop_reason=StopReason.FAILED,
            response_text=self._decode(builder.tokens[len(prompt.tokens) :]),
            error=f"the agent of {self.file}: {error}"
            if isinstance(error, EpisodeMistake)
            else str(error),
            failure=error.failure,
        )

    def _decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False))
