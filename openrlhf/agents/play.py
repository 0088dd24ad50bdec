"""Episodes of the user's agent, one for each sample of a prompt, played in user processes."""

import asyncio
import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from openrlhf.agents.assembly import Assembled, EpisodeMistake, assemble
from openrlhf.config.options import ConfigError
from openrlhf.config.rollout import RolloutConfig, RuleConfig
from openrlhf.core.trajectory import Prompt, StopReason, Trajectory, TrajectoryBuilder
from openrlhf.isolation.pool import Asked, ProcessPool, UserCall, UserCodeError, loading
from openrlhf.reporting import warn
from openrlhf.rollout.engine import RequestRefused
from openrlhf.rollout.generator import Generate, SamplingSpec
from openrlhf.rollout.sampling import Generation, SamplingParams

EPISODES_PER_PROCESS = 128  # concurrent episodes; more episodes wait before their deadline starts
NEW_CONVERSATION = "\n\n[new conversation]\n"  # separates texts in samples.jsonl
CANCELLATION_GRACE_S = 5.0  # time for a cancelled episode to end


@dataclass(frozen=True, kw_only=True)
class _Draw:
    """One sample of a prompt, played by an agent."""

    prompt: Prompt
    spec: SamplingSpec
    generate: Generate
    index: int
    params: SamplingParams

    async def answer(self, turn: int, question: dict[str, Any]) -> Generation | str:
        """Return a sample from the engine, or the reason why it refuses the request."""
        params = SamplingParams(**question["params"])
        if params.seed in (None, self.params.seed):
            params.seed = self.spec.seed_of(self.prompt, self.index, turn)
        try:
            samples = await self.generate(self.prompt, self.spec, question["prompt"], [params])
        except RequestRefused as refused:
            return str(refused)
        return samples[0]


class AgentEpisodes:
    """Episodes of at most `max_length` tokens, played in processes that load the agent's file.

    Each process plays many episodes concurrently. Without `needs_reward`, reward models score the
    episodes that have no reward. The agents' output goes to `agent-<n>.log` or
    `agent-alone-<n>.log` in `log_dir`, one file per process, or to stderr without `log_dir`.
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
        self.tokenizer = tokenizer
        self.rollout = rollout
        self.needs_reward = needs_reward
        self.pool = ProcessPool(
            reward.workers,
            at_once=EPISODES_PER_PROCESS,
            memory_gib=reward.memory_gib,
            grace=CANCELLATION_GRACE_S,
            log_dir=log_dir,
            name="agent",
        )
        self._logged_notices: set[str] = set()  # kinds
        self._setup = loading(
            self.file,
            "openrlhf.agents.program:start",
            self.file,
            pickle.dumps(tokenizer),
            max_length,
            rollout.max_turns,
            seconds=rollout.step_timeout,
            limit="--rollout.step_timeout",
        )

    async def check(self) -> None:
        """Load the agent's file in one process.

        Raises ConfigError with the traceback if loading fails.
        """
        try:
            await self.pool.run(self._setup, self._setup)
        except UserCodeError as error:
            raise ConfigError(f"--train.agent_func_path: {error}") from error

    def close(self) -> None:
        """Kill every process. Running episodes fail."""
        self.pool.close()

    async def play(
        self, prompt: Prompt, spec: SamplingSpec, generate: Generate
    ) -> list[Trajectory]:
        """Play an episode for each sample of the prompt."""
        episodes = []
        for index, params in enumerate(spec.agent_params_for(prompt)):
            draw = _Draw(prompt=prompt, spec=spec, generate=generate, index=index, params=params)
            episodes.append(self._play(draw))
        return list(await asyncio.gather(*episodes))

    async def _play(self, draw: _Draw) -> Trajectory:
        """Play one episode.

        Returns a failed episode if the agent raised, timed out, or returned an invalid result.
        """
        loop = asyncio.get_running_loop()

        def answer(turn: int, question: dict[str, Any]) -> asyncio.Future[Generation | str]:
            # Called in the event loop of the pool, which runs in its own thread.
            answering = asyncio.run_coroutine_threadsafe(draw.answer(turn, question), loop)
            return asyncio.wrap_future(answering)

        prompt = draw.prompt
        call = UserCall(
            name=f"an episode of {self.file}",
            target="openrlhf.agents.program:play",
            args=(prompt.text, prompt.label, draw.params, prompt.images),
            seconds=self.rollout.step_timeout,
            limit="--rollout.step_timeout, between two samples",
            total_seconds=self.rollout.episode_timeout,
            total_limit="--rollout.episode_timeout",
            answer=answer,
        )
        try:
            result = await self.pool.run(call, self._setup)
            episode = assemble(
                result, call.asked, draw.spec.max_len, vocabulary=len(self.tokenizer)
            )
            if episode.reward.reward is None and self.needs_reward:
                raise EpisodeMistake(
                    "execute returned no reward, and there is no --reward.model_name_or_path"
                )
        except EpisodeMistake as mistake:
            return self._failed(draw, call.asked, mistake, f"the agent of {self.file}: {mistake}")
        except UserCodeError as error:
            return self._failed(draw, call.asked, error, str(error))
        for kind, sentence in episode.notices.items():
            if kind not in self._logged_notices:
                self._logged_notices.add(kind)
                warn(f"The agent of {self.file}: {sentence}.")
        return self._finished(draw, episode)

    def _finished(self, draw: _Draw, episode: Assembled) -> Trajectory:
        reward = episode.reward
        first, *others = [*episode.earlier, episode.builder]
        prompt_length = len(first.tokens)
        if any(first.action_mask):
            prompt_length = first.action_mask.index(True)
        texts = [self._decode(first.tokens[prompt_length:])]
        texts += [self._decode(builder.tokens) for builder in others]
        earlier = [
            builder.finish(prompt=draw.prompt, sample_index=draw.index, stop_reason=StopReason.STOP)
            for builder in episode.earlier
        ]
        stop_reason = StopReason.STOP
        if episode.truncated:
            stop_reason = StopReason.LENGTH
        return episode.builder.finish(
            prompt=draw.prompt,
            sample_index=draw.index,
            stop_reason=stop_reason,
            reward=reward.reward,
            score=reward.score,
            extra_logs=reward.extra_logs,
            turn_rewards=episode.turn_rewards,
            response_text=NEW_CONVERSATION.join(texts),
            turns=episode.turns,
            earlier=tuple(earlier),
        )

    def _failed(
        self, draw: _Draw, asked: list[Asked], error: UserCodeError, message: str
    ) -> Trajectory:
        """Return a failed episode, which is never trained on, with the tokens sampled so far."""
        builder = TrajectoryBuilder(draw.prompt.tokens)
        for request in reversed(asked):
            sample = request.answer
            if request.own and isinstance(sample, Generation):
                builder = TrajectoryBuilder(request.question["prompt"])
                builder.append_action(sample.tokens, sample.logprobs, sample.weight_versions)
                break
        return builder.finish(
            prompt=draw.prompt,
            sample_index=draw.index,
            stop_reason=StopReason.FAILED,
            response_text=self._decode(builder.tokens[len(draw.prompt.tokens) :]),
            error=message,
            failure=error.failure,
        )

    def _decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False))
