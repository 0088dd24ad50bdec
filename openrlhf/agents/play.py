"""Runs the user's agent in separate processes, for one episode per sample of a prompt."""

import asyncio
import os
import pickle
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from openrlhf.agents.answers import unpacked
from openrlhf.agents.assembly import Assembled, EpisodeMistake, assemble
from openrlhf.config.options import ConfigError
from openrlhf.config.rollout import RolloutConfig, RuleConfig
from openrlhf.core.trajectory import Prompt, StopReason, Trajectory, TrajectoryBuilder
from openrlhf.isolation.pool import Asked, ProcessPool, UserCall, UserCodeError, loading
from openrlhf.reporting import warn
from openrlhf.rollout.engine import RequestRefused
from openrlhf.rollout.generator import Generate, SamplingSpec
from openrlhf.rollout.sampling import Generation, SamplingParams

# maximum number of concurrent episodes; a waiting episode's deadline has not started yet
EPISODES_PER_PROCESS = 128
NEW_CONVERSATION = "\n\n[new conversation]\n"  # separates conversations in samples.jsonl
CANCELLATION_GRACE_S = 5.0  # time allowed for a cancelled episode to end


class AgentEpisodes:
    """Episodes of at most `max_length` tokens, run in processes that load the agent's file.

    Each process runs many episodes concurrently. Without `needs_reward`, reward models score the
    episodes that have no reward. With `log_dir`, each process writes the agents' output to a file
    in this folder, `agent-<n>.log` or `agent-alone-<n>.log`. Without `log_dir`, the output goes to
    stderr.
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
        """Run one episode for each sample of the prompt."""
        episodes = []
        for index, params in enumerate(spec.agent_params_for(prompt)):
            episodes.append(self._play(prompt, spec, generate, index, params))
        return list(await asyncio.gather(*episodes))

    async def _play(
        self,
        prompt: Prompt,
        spec: SamplingSpec,
        generate: Generate,
        index: int,
        params: SamplingParams,
    ) -> Trajectory:
        """Run one episode.

        Returns a failed episode if the agent raised, timed out, or returned an invalid result.
        """
        loop = asyncio.get_running_loop()

        async def sample(turn: int, question: dict[str, Any]) -> Generation | str:
            requested = SamplingParams(**question["params"])
            if requested.seed in (None, params.seed):
                requested.seed = spec.seed_of(prompt, index, turn)
            try:
                tokens = unpacked(question["prompt"])
                [generation] = await generate(prompt, spec, tokens, [requested])
            except RequestRefused as refused:
                return str(refused)
            return generation

        def answer(turn: int, question: dict[str, Any]) -> asyncio.Future[Generation | str]:
            # This function is called in the pool's event loop, which runs in its own thread.
            sampling = asyncio.run_coroutine_threadsafe(sample(turn, question), loop)
            return asyncio.wrap_future(sampling)

        call = UserCall(
            name=f"an episode of {self.file}",
            target="openrlhf.agents.program:play",
            args=(prompt.text, prompt.label, params, prompt.images),
            seconds=self.rollout.step_timeout,
            limit="--rollout.step_timeout, between two samples",
            total_seconds=self.rollout.episode_timeout,
            total_limit="--rollout.episode_timeout",
            answer=answer,
        )
        try:
            result = await self.pool.run(call, self._setup)
            episode = assemble(result, call.asked, spec.max_len, vocabulary=len(self.tokenizer))
            if episode.reward.reward is None and self.needs_reward:
                raise EpisodeMistake(
                    "execute returned no reward, and --reward.model_name_or_path is not set"
                )
        except UserCodeError as error:
            return self._failed(prompt, index, call.asked, error)
        for kind, sentence in episode.notices.items():
            if kind not in self._logged_notices:
                self._logged_notices.add(kind)
                warn(f"The agent in {self.file}: {sentence}.")
        return self._finished(prompt, index, episode)

    def _finished(self, prompt: Prompt, index: int, episode: Assembled) -> Trajectory:
        first, *others = [*episode.earlier, episode.builder]
        prompt_length = [*first.action_mask, True].index(True)
        texts = [self._decode(first.tokens[prompt_length:])]
        texts += [self._decode(builder.tokens) for builder in others]
        common: dict[str, Any] = {"prompt": prompt, "sample_index": index}
        earlier: list[Trajectory] = []
        for builder in episode.earlier:
            earlier.append(builder.finish(**common, stop_reason=StopReason.STOP))
        return episode.builder.finish(
            **common,
            stop_reason=StopReason.LENGTH if episode.truncated else StopReason.STOP,
            reward=episode.reward.reward,
            score=episode.reward.score,
            extra_logs=episode.reward.extra_logs,
            turn_rewards=episode.turn_rewards,
            response_text=NEW_CONVERSATION.join(texts),
            turns=episode.turns,
            earlier=tuple(earlier),
        )

    def _failed(
        self, prompt: Prompt, index: int, asked: list[Asked], error: UserCodeError
    ) -> Trajectory:
        """Return a failed episode with the tokens sampled so far; the run does not train on it."""
        builder = TrajectoryBuilder(prompt.tokens)
        for request in asked:
            sample = request.answer
            if request.own and isinstance(sample, Generation):
                builder = TrajectoryBuilder(unpacked(request.question["prompt"]))
                builder.append_action(sample.tokens, sample.logprobs, sample.weight_versions)
        message = str(error)
        if isinstance(error, EpisodeMistake):
            message = f"the agent in {self.file}: {message}"
        return builder.finish(
            prompt=prompt,
            sample_index=index,
            stop_reason=StopReason.FAILED,
            response_text=self._decode(builder.tokens[len(prompt.tokens) :]),
            error=message,
            failure=error.failure,
        )

    def _decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False))
