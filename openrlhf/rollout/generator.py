"""Prompts in, rewarded trajectories out: fan-out over the engines, rewards as samples finish, batches in prompt order."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from transformers import PreTrainedTokenizerBase

from openrlhf.distributed.worker_group import give_up
from openrlhf.observability.metrics import Metric
from openrlhf.rewards.budget import ErrorBudget
from openrlhf.rewards.protocol import Reward, RewardRequest, RewardResult
from openrlhf.rollout.engine import Generation, SamplingParams
from openrlhf.rollout.measures import SampleCost, generation_metrics
from openrlhf.rollout.routing import Router
from openrlhf.trajectory import Failure, Prompt, StopReason, Trajectory, TrajectoryBuilder

T = TypeVar("T")
Rejects = Callable[
    [Sequence[Trajectory]], bool
]  # whether the samples of a prompt are to be replaced by those of another
logger = logging.getLogger(__name__)
CLOSE_S = 60.0  # for hosts to end


class RolloutError(RuntimeError):
    """Generation failed or did not finish in time."""


@dataclass(frozen=True, kw_only=True)
class SamplingSpec:
    """How the samples of a prompt are drawn. One for training and one for evaluation per run."""

    purpose: str  # "train" or "eval": part of every seed
    n_samples: int
    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int | None  # None: what `max_len` leaves
    max_len: int  # prompt and response, tokens
    seed: int | None  # None: unseeded sampling
    stop: tuple[str, ...] = ()  # texts that end a response; they stay in it, as tokens that were sampled
    stop_token_ids: tuple[int, ...] = ()

    def params_for(self, prompt: Prompt, prompt_length: int) -> list[SamplingParams]:
        """Sampling parameters of each sample of a prompt."""
        budget = self.max_len - prompt_length
        return [
            self._params(prompt, sample, min(budget, self.max_new_tokens or budget)) for sample in range(self.n_samples)
        ]

    def agent_params_for(self, prompt: Prompt) -> list[SamplingParams]:
        """What the agent of each sample is given: `max_tokens` is of a turn, and log-probabilities are asked for."""
        return [
            replace(self._params(prompt, sample, self.max_new_tokens), logprobs=1) for sample in range(self.n_samples)
        ]

    def _params(self, prompt: Prompt, sample: int, max_tokens: int | None) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_tokens=max_tokens,
            stop=list(self.stop) or None,
            stop_token_ids=list(self.stop_token_ids) or None,
            seed=self.seed_of(prompt, sample),
        )

    def seed_of(self, prompt: Prompt, sample: int, turn: int = 0) -> int | None:
        """The seed of one sampled turn."""
        return None if self.seed is None else sample_seed(self.seed, self.purpose, prompt.index, sample, turn)

    def clip_prompt(self, tokens: list[int]) -> list[int]:
        """The last tokens of a prompt that leave room for a response."""
        room = self.max_len - (self.max_new_tokens or 1)
        return tokens[-room:]


def sample_seed(seed: int, purpose: str, prompt: int, sample: int, turn: int = 0) -> int:
    """The seed of one sampled turn: a function of what is sampled, not of when or where. 32 bits."""
    name = f"{seed}/{purpose}/{prompt}/{sample}/{turn}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big")


Generate = Callable[[Prompt, SamplingSpec, list[int], list[SamplingParams]], Awaitable[list[Generation]]]


class Agents(Protocol):
    """What plays episodes in place of single samples, with an engine to `generate` with."""

    async def check(self) -> None:
        """Raise ConfigError where it cannot work."""
        ...

    async def play(self, prompt: Prompt, spec: SamplingSpec, generate: Generate) -> list[Trajectory]: ...

    async def close(self) -> None: ...


class RolloutGenerator:
    """Draws samples from the engines and has them rewarded. Lives in the controller; user code runs elsewhere.

    `engines` are handles of `RolloutEngine` actors. Without `agents` an episode is one sample of the prompt, which `reward`
    scores; with them it is what they make of it. `timeout_s` bounds one call of `rollout`.
    """

    def __init__(
        self,
        engines: Sequence[Any],
        tokenizer: PreTrainedTokenizerBase,
        reward: Reward | None,
        *,
        agents: Agents | None = None,
        errors: ErrorBudget,
        timeout_s: float,
    ) -> None:
        self.engines = list(engines)
        self.tokenizer = tokenizer
        self.reward, self.agents = reward, agents
        self.errors = errors
        self.timeout_s = timeout_s
        self._clipped = False  # a prompt, and the user was told
        self._loop = BackgroundLoop()
        self._router = Router(len(self.engines))
        self._costs: list[SampleCost] = []  # of training samples, since `metrics` was last asked

    def rollout(
        self,
        prompts: Iterable[Prompt],
        spec: SamplingSpec,
        *,
        groups: int | None = None,
        rejects: Rejects = lambda group: False,
        may_end_early: bool = False,
    ) -> list[Trajectory]:
        """All samples of all prompts, in prompt order, samples of a prompt adjacent, failed ones among them.

        With `groups`, prompts are taken until the samples of so many are not rejected: the next one as soon as one is.
        Where the batch `may_end_early`, it does, with those that are finished, once so many have failed that the error budget
        is exceeded whatever becomes of the others.
        Raises RolloutError when the deadline passes, and what an engine raised when one fails.
        """
        if groups is None:
            prompts = list(prompts)
            groups = len(prompts)
        work = self._rollout(iter(prompts), spec, groups, rejects, may_end_early=may_end_early)
        return self._loop.run(work, self.timeout_s)

    async def _rollout(
        self, prompts: Iterator[Prompt], spec: SamplingSpec, groups: int, rejects: Rejects, *, may_end_early: bool
    ) -> list[Trajectory]:
        tried: dict[int, list[Trajectory]] = {}

        async def sample_until_one_stays() -> int:
            for prompt in prompts:
                tried[prompt.index] = group = await self._sample_group(prompt, spec)
                if not rejects(group):
                    return sum(trajectory.failed for trajectory in group)
            return 0

        sampling = [asyncio.ensure_future(sample_until_one_stays()) for _ in range(groups)]
        try:
            failed = 0
            for finished in asyncio.as_completed(sampling):
                failed += await finished
                if may_end_early and self.errors.exceeded_by(failed, of=groups * spec.n_samples):
                    break
        finally:
            for task in sampling:
                task.cancel()
            await asyncio.gather(*sampling, return_exceptions=True)
        return [trajectory for index in sorted(tried) for trajectory in tried[index]]

    async def _sample_group(self, prompt: Prompt, spec: SamplingSpec) -> list[Trajectory]:
        if self.agents:
            return await self.agents.play(prompt, spec, self._generate)
        tokens = spec.clip_prompt(prompt.tokens)
        if len(tokens) < len(prompt.tokens) and not self._clipped:
            self._clipped = True
            logger.warning(
                "Prompt %d has %d tokens and keeps its last %d, like all that leave no room for a response in --data.max_len.",
                prompt.index, len(prompt.tokens), len(tokens),
            )  # fmt: skip
        generations = await self._generate(prompt, spec, tokens, spec.params_for(prompt, len(tokens)))
        requests = [
            RewardRequest(
                query=self._decode(tokens + generation.tokens),
                prompt=prompt.text,
                label=prompt.label,
                response=self._decode(generation.tokens),
                answer=str(self.tokenizer.decode(generation.tokens, skip_special_tokens=True)),
            )
            for generation in generations
        ]
        # Without a reward here, a reward worker scores the finished episodes.
        results = await self.reward.score(requests) if self.reward else [RewardResult()] * len(requests)
        return [
            self._trajectory(prompt, sample, tokens, generation, request.response_text, result)
            for sample, (generation, request, result) in enumerate(zip(generations, requests, results, strict=True))
        ]

    def check_agents(self) -> None:
        """Load the agent's file. Raises ConfigError with the traceback where that fails."""
        if self.agents:
            self._loop.run(self.agents.check(), self.timeout_s)

    def _decode(self, tokens: list[int]) -> str:
        """The text that rewards and samples show: special tokens kept."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False))

    async def _generate(
        self, prompt: Prompt, spec: SamplingSpec, tokens: list[int], params: list[SamplingParams]
    ) -> list[Generation]:
        key, asked = (spec.purpose, prompt.index), time.perf_counter()
        engine = self._router.pick(key, len(params))
        answer = self.engines[engine].generate.remote(tokens, params)
        try:
            generations = await answer
        except asyncio.CancelledError:  # the engine is to give it up too
            give_up(answer)
            raise
        finally:
            self._router.done(key, engine, len(params))
        if spec.purpose == "train":
            self._costs += [
                SampleCost(asked=asked, seconds=g.seconds, prompt_tokens=len(tokens), cached_tokens=g.cached_tokens)
                for g in generations
            ]
        return generations

    def metrics(self) -> dict[str, Metric]:
        """What the training samples drawn since the last call cost."""
        costs, self._costs = self._costs, []
        return generation_metrics(costs)

    def _trajectory(
        self,
        prompt: Prompt,
        sample: int,
        tokens: list[int],
        generation: Generation,
        response: str,
        result: RewardResult,
    ) -> Trajectory:
        builder = TrajectoryBuilder(tokens)
        builder.append_action(generation.tokens, generation.logprobs, generation.weight_versions)
        finished = builder.finish(
            prompt=prompt,
            sample_index=sample,
            stop_reason=_STOP_REASONS.get(generation.finish_reason, StopReason.FAILED),
            reward=result.reward,
            score=result.reward if result.score is None else result.score,
            extra_logs=result.extra_logs,
            response_text=response,
            error=result.error,
            failure=result.failure,
        )
        if finished.failed:
            return finished.failing(f"the engine ended it: {generation.finish_reason}", Failure.ENGINE)
        return finished if result.error is None else self._failed_reward(finished)

    def _failed_reward(self, finished: Trajectory) -> Trajectory:
        """Apply --reward.on_error: keep the episode with a fixed reward, or mark it failed. Its error stays with it."""
        fallback = self.errors.policy.fallback
        if fallback is None:
            return finished.failing(finished.error, finished.failure)
        return replace(finished, reward=fallback, score=fallback)

    def close(self) -> None:
        """Stop the background loop, and end the agents."""
        if self.agents:
            self._loop.run(self.agents.close(), CLOSE_S)
        self._loop.close()


_STOP_REASONS = {"stop": StopReason.STOP, "length": StopReason.LENGTH}


class BackgroundLoop:
    """An event loop in a thread of its own, for asynchronous work asked for by synchronous code."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout-loop", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """The result of `work`. Raises RolloutError when it takes longer than `timeout_s` seconds."""
        future = asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, timeout_s), self._loop)
        try:
            return future.result()
        except TimeoutError as error:
            raise RolloutError(
                f"generation and rewards of one batch took longer than {timeout_s:g} s. If the responses are merely long, "
                "raise --train.step_timeout, or lower --rollout.max_new_tokens or --rollout.batch_size."
            ) from error

    def close(self) -> None:
        """Stop the loop and its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)
