"""Prompts in, finished groups out: samples of every prompt from the engines, rewarded as they
finish.
"""

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Iterable
from dataclasses import KW_ONLY, dataclass, replace
from itertools import islice
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from openrlhf.config.rollout import RolloutConfig
from openrlhf.core.trajectory import Failure, Prompt, StopReason, Trajectory, TrajectoryBuilder
from openrlhf.observability.metrics import Metric
from openrlhf.observability.once import warn_once
from openrlhf.rewards.protocol import Reward, RewardResult, request_of
from openrlhf.rollout.measures import SampleCost, generation_metrics
from openrlhf.rollout.sampling import Generation, SamplingParams

Group = list[Trajectory]  # all samples of one prompt, failed ones among them


@dataclass(frozen=True, kw_only=True)
class SamplingSpec:
    """How the samples of a prompt are drawn. A run has one for training and one for evaluation."""

    purpose: str  # "train" or "eval": part of every seed
    rollout: RolloutConfig  # how many samples, at which temperature, and when they end
    max_len: int  # prompt and response, tokens
    seed: int | None  # None: unseeded sampling
    repetition_penalty: float = 1.0

    @property
    def n_samples(self) -> int:
        """Samples of each prompt."""
        return self.rollout.n_samples_per_prompt

    def params_for(self, prompt: Prompt, prompt_length: int) -> list[SamplingParams]:
        """Sampling parameters of each sample of a prompt."""
        budget = self.max_len - prompt_length
        return self._params(prompt, min(budget, self.rollout.max_new_tokens or budget))

    def agent_params_for(self, prompt: Prompt) -> list[SamplingParams]:
        """Sampling parameters for the agent of each sample, with log-probabilities. `max_tokens`
        limits a turn.
        """
        return [
            replace(params, logprobs=1)
            for params in self._params(prompt, self.rollout.max_new_tokens)
        ]

    def _params(self, prompt: Prompt, max_tokens: int | None) -> list[SamplingParams]:
        common = SamplingParams(
            temperature=self.rollout.temperature,
            top_p=self.rollout.top_p,
            top_k=self.rollout.top_k,
            repetition_penalty=self.repetition_penalty,
            max_tokens=max_tokens,
            stop=list(self.rollout.stop) or None,
            stop_token_ids=list(self.rollout.stop_token_ids) or None,
        )
        return [
            replace(common, seed=self.seed_of(prompt, sample)) for sample in range(self.n_samples)
        ]

    def seed_of(self, prompt: Prompt, sample: int, turn: int = 0) -> int | None:
        """The seed of one sampled turn, 32 bits. It depends on what is sampled, not on when or
        where.
        """
        if self.seed is None:
            return None
        name = f"{self.seed}/{self.purpose}/{prompt.index}/{sample}/{turn}"
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big")

    @property
    def prompt_room(self) -> int:
        """Tokens of the longest prompt that leaves room for a response."""
        return self.max_len - (self.rollout.max_new_tokens or 1)


def in_prompt_order(groups: Iterable[Group]) -> list[Trajectory]:
    """The samples of all groups, in the order of their prompts."""
    return [t for group in sorted(groups, key=lambda group: group[0].prompt.index) for t in group]


Annotate = Callable[[Group], Awaitable[Group]]
Sampled = Callable[[Prompt], None]


async def as_sampled(group: Group) -> Group:
    """The unchanged group: nothing is added before the filter reads it."""
    return group


def unobserved(_: Prompt) -> None:
    """Ignore that a prompt's last token is drawn."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """How a stream of groups is generated. It travels with the prompts, so nothing is read back
    from the trainer.

    `annotated` may add scores of reward models, and mark the samples of a prompt as filtered. A
    filtered prompt is replaced by the next prompt, so that the stream has as many other groups as
    were asked for. `sampled` is called when the engines have drawn the last token of a prompt's
    samples, before these are rewarded; with agents, which may sample again at any time, when all
    episodes of the prompt have ended.
    """

    spec: SamplingSpec
    step: int  # the training step; for an evaluation, the number of steps trained so far
    annotated: Annotate = as_sampled
    sampled: Sampled = unobserved


class Generator(Protocol):
    """Gives prompts their samples: from engines, or from files of an earlier run."""

    def stream(
        self,
        prompts: Iterable[Prompt],
        request: Request,
        *,
        groups: int,
        at_once: int | None = None,
    ) -> AsyncGenerator[Group]:
        """Groups in the order in which they finish, until `groups` are not filtered or the prompts
        are used up.

        At most `at_once` prompts (by default `groups`) are sampled at a time.
        """
        ...

    def metrics(self) -> dict[str, Metric]:
        """The cost of the training samples since the last call."""
        ...


class Engines(Protocol):
    """Samples tokens. Samples with the same `key` share a prefix."""

    async def generate(
        self, key: Hashable, tokens: list[int], params: list[SamplingParams]
    ) -> list[Generation]: ...

    async def rest(self) -> None: ...  # no sample is asked for until the next stream

    def metrics(self) -> dict[str, Metric]: ...  # since the last call


Generate = Callable[
    [Prompt, SamplingSpec, list[int], list[SamplingParams]], Awaitable[list[Generation]]
]


class Agents(Protocol):
    """Plays episodes in place of single samples, with `generate` as the engine."""

    async def play(self, prompt: Prompt, spec: SamplingSpec, generate: Generate) -> Group: ...


@dataclass(eq=False, repr=False)
class RolloutGenerator:
    """Draws samples from the engines and has them rewarded. Lives in the controller; user code runs
    in other processes.

    Without `agents` an episode is one sample of the prompt, and `reward` scores the episode. With
    agents an agent plays the episode. Without a reward, reward models score the finished episodes
    later. An episode whose reward failed gets the reward `fallback` (--reward.on_error); without a
    fallback the episode has failed.
    """

    engines: Engines
    tokenizer: PreTrainedTokenizerBase
    reward: Reward | None
    _: KW_ONLY
    agents: Agents | None = None
    fallback: float | None = None

    def __post_init__(self) -> None:
        self._costs: list[SampleCost] = []  # of training samples, since `metrics` was last called

    async def stream(
        self,
        prompts: Iterable[Prompt],
        request: Request,
        *,
        groups: int,
        at_once: int | None = None,
    ) -> AsyncGenerator[Group]:
        """See `Generator`. Closing the stream cancels the samples under way. Raises the error of a
        failed engine.
        """
        waiting = iter(prompts)
        missing = groups  # prompts to start, if no group under way is filtered
        under_way: set[asyncio.Task[Group]] = set()

        def start(count: int) -> int:
            fresh = [
                asyncio.ensure_future(self._finished(prompt, request))
                for prompt in islice(waiting, count)
            ]
            under_way.update(fresh)
            return len(fresh)

        try:
            missing -= start(min(missing, at_once or missing))
            while under_way:
                done, _ = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
                missing += sum(task.result()[0].filtered for task in done)
                missing -= start(min(missing, len(done)))
                for task in done:
                    under_way.discard(task)
                    yield task.result()
        finally:
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)
            await self.engines.rest()

    async def _finished(self, prompt: Prompt, request: Request) -> Group:
        if self.agents:
            group = await self.agents.play(prompt, request.spec, self._generate)
            request.sampled(prompt)
        else:
            group = await self._sample(prompt, request)
        return await request.annotated(group)

    async def _sample(self, prompt: Prompt, request: Request) -> Group:
        spec = request.spec
        tokens = prompt.tokens[-spec.prompt_room :]
        if len(tokens) < len(prompt.tokens):
            warn_once(
                f"Prompts that leave no room for a response in --data.max_len keep their last {len(tokens)} tokens."
            )
        generations = await self._generate(
            prompt, spec, tokens, spec.params_for(prompt, len(tokens))
        )
        request.sampled(prompt)
        reads = self.reward.reads if self.reward else ()
        requests = [
            request_of(
                self.tokenizer, prompt.text, prompt.label, tokens, generation.tokens, reads=reads
            )
            for generation in generations
        ]
        results = (
            await self.reward.score(requests) if self.reward else [RewardResult()] * len(requests)
        )
        return [
            self._trajectory(prompt, sample, tokens, generation, request.response, result)
            for sample, (generation, request, result) in enumerate(
                zip(generations, requests, results, strict=True)
            )
        ]

    async def _generate(
        self, prompt: Prompt, spec: SamplingSpec, tokens: list[int], params: list[SamplingParams]
    ) -> list[Generation]:
        asked = time.perf_counter()
        generations = await self.engines.generate((spec.purpose, prompt.index), tokens, params)
        if spec.purpose == "train":
            self._costs.extend(  # never assigned here: another thread takes the list away
                SampleCost(
                    asked=asked,
                    seconds=g.seconds,
                    prompt_tokens=len(tokens),
                    cached_tokens=g.cached_tokens,
                )
                for g in generations
            )
        return generations

    def metrics(self) -> dict[str, Metric]:
        """The cost of the training samples drawn since the last call."""
        costs, self._costs = self._costs, []
        return generation_metrics(costs) | self.engines.metrics()

    def _trajectory(
        self,
        prompt: Prompt,
        sample: int,
        tokens: list[int],
        generation: Generation,
        text: str,
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
            response_text=text,
            error=result.error,
            failure=result.failure,
        )
        if finished.failed:
            return finished.failing(
                f"the engine ended the sample: {generation.finish_reason}", Failure.ENGINE
            )
        if result.error is None:
            return finished
        if self.fallback is None:
            return finished.failing(finished.error, finished.failure)
        return replace(finished, reward=self.fallback, score=self.fallback)


_STOP_REASONS = {"stop": StopReason.STOP, "length": StopReason.LENGTH}
