"""The generator, which samples groups of responses to prompts and rewards them as they finish."""

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Hashable, Iterable
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from openrlhf.config.rollout import RolloutConfig
from openrlhf.core.trajectory import Failure, Prompt, StopReason, Trajectory, TrajectoryBuilder
from openrlhf.observability.metrics import Metric
from openrlhf.reporting import warn_once
from openrlhf.rewards.protocol import Reward, RewardResult, request_of
from openrlhf.rollout.measures import SampleCost, generation_metrics
from openrlhf.rollout.sampling import Generation, SamplingParams

Group = list[Trajectory]  # all samples of one prompt, including failed samples


@dataclass(frozen=True, kw_only=True)
class SamplingSpec:
    """Settings for sampling: the number of samples, sampling parameters and seeds.

    A run has one specification for training and one for evaluation.
    """

    purpose: str  # "train" or "eval"; used to derive every seed
    rollout: RolloutConfig  # number of samples, temperature and stop conditions
    max_len: int  # maximum length of prompt and response together, in tokens
    seed: int | None  # None: unseeded sampling
    repetition_penalty: float = 1.0

    @property
    def n_samples(self) -> int:
        """Number of samples per prompt."""
        return self.rollout.n_samples_per_prompt

    def params_for(self, prompt: Prompt, prompt_length: int) -> list[SamplingParams]:
        """Return the sampling parameters for each sample of a prompt."""
        budget = self.max_len - prompt_length
        return self._params(prompt, min(budget, self.rollout.max_new_tokens or budget))

    def agent_params_for(self, prompt: Prompt) -> list[SamplingParams]:
        """Return the sampling parameters for each sample's agent, with log-probabilities.

        `max_tokens` limits each turn.
        """
        return self._params(prompt, self.rollout.max_new_tokens, logprobs=1)

    def _params(
        self, prompt: Prompt, max_tokens: int | None, logprobs: int | None = None
    ) -> list[SamplingParams]:
        common = SamplingParams(
            temperature=self.rollout.temperature,
            top_p=self.rollout.top_p,
            top_k=self.rollout.top_k,
            repetition_penalty=self.repetition_penalty,
            max_tokens=max_tokens,
            stop=list(self.rollout.stop) or None,
            stop_token_ids=list(self.rollout.stop_token_ids) or None,
            logprobs=logprobs,
        )
        seeds = [self.seed_of(prompt, sample) for sample in range(self.n_samples)]
        return [replace(common, seed=seed) for seed in seeds]

    def seed_of(self, prompt: Prompt, sample: int, turn: int = 0) -> int | None:
        """Return the 32-bit seed of one sampled turn.

        The seed depends on the prompt, the sample and the turn, but not on the time or the engine.
        """
        if self.seed is None:
            return None
        name = f"{self.seed}/{self.purpose}/{prompt.index}/{sample}/{turn}"
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big")

    @property
    def prompt_room(self) -> int:
        """The maximum number of prompt tokens that leaves room for a response."""
        return self.max_len - (self.rollout.max_new_tokens or 1)


def in_prompt_order(groups: Iterable[Group]) -> list[Trajectory]:
    """Return the samples of all groups in prompt order."""
    samples: list[Trajectory] = []
    for group in sorted(groups, key=lambda group: group[0].prompt.index):
        samples += group
    return samples


GroupTransform = Callable[[Group], Awaitable[Group]]
Sampled = Callable[[Prompt], None]


async def unchanged(group: Group) -> Group:
    """Return the group unchanged."""
    return group


def unobserved(_: Prompt) -> None:
    """Do nothing when a prompt's samples are complete."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """Settings for a stream of groups.

    The settings are passed with the prompts, so that the generator need not access the trainer.

    The function `on_group` may add reward model scores and mark a prompt's samples as filtered. A
    filtered prompt is replaced by the next prompt, so that the stream yields the requested number
    of unfiltered groups. `sampled` is called when the engines have sampled the last token of a
    prompt's samples, before the samples are rewarded. With agents, which may sample again at any
    time, `sampled` is called when all of the prompt's episodes have ended.
    """

    spec: SamplingSpec
    step: int  # the training step; for an evaluation, the number of steps trained so far
    on_group: GroupTransform = unchanged
    sampled: Sampled = unobserved


class Generator(Protocol):
    """A source of samples for prompts: engines, or files from an earlier run."""

    def stream(
        self,
        prompts: Iterable[Prompt],
        request: Request,
        *,
        groups: int,
        at_once: int | None = None,
    ) -> AsyncGenerator[Group]:
        """Yield groups in the order in which they finish.

        The stream ends after `groups` unfiltered groups, or with the last prompt. At most `at_once`
        prompts (by default `groups`) are sampled concurrently.
        """
        ...

    async def rest(self) -> None:
        """Free device memory until the next stream or publication, as each stream does at its end.

        Called in steps that need no stream.
        """
        ...

    def metrics(self) -> dict[str, Metric]:
        """Return the cost of the training samples since the last call."""
        ...


class Engines(Protocol):
    """A token sampler. Samples with the same `key` share a prefix."""

    async def generate(
        self, key: Hashable, tokens: list[int], params: list[SamplingParams]
    ) -> list[Generation]:
        """Return one sample of the prompt `tokens` for each of `params`, in order."""
        ...

    async def rest(self) -> None:
        """Free device memory. Called at the end of each stream."""
        ...

    def metrics(self) -> dict[str, Metric]:
        """Return the metrics since the last call."""
        ...


Generate = Callable[
    [Prompt, SamplingSpec, list[int], list[SamplingParams]], Awaitable[list[Generation]]
]


class Agents(Protocol):
    """Agents that run entire episodes instead of single samples, using `generate`."""

    async def play(self, prompt: Prompt, spec: SamplingSpec, generate: Generate) -> Group:
        """Run an episode for each sample of the prompt, and return all episodes, even failures."""
        ...


@dataclass(eq=False, repr=False)
class RolloutGenerator:
    """A generator that requests samples from the engines and rewards them.

    The generator runs in the controller; user code runs in other processes. Without `agents`, an
    episode is one sample of the prompt, and `reward` scores the episode. With `agents`, an agent
    runs the episode. If the agent returns no reward, reward models score the finished episode
    later. If an episode's reward call fails, the episode gets the reward `fallback`
    (--reward.on_error). Without a fallback, the episode fails.
    """

    engines: Engines
    tokenizer: PreTrainedTokenizerBase
    reward: Reward | None
    _: KW_ONLY
    agents: Agents | None = None
    fallback: float | None = None

    def __post_init__(self) -> None:
        self._costs: list[SampleCost] = []  # training samples since the last call to `metrics`

    async def stream(
        self,
        prompts: Iterable[Prompt],
        request: Request,
        *,
        groups: int,
        at_once: int | None = None,
    ) -> AsyncGenerator[Group]:
        """Yield groups as `Generator.stream` does.

        Closing the stream cancels the running samples. If an engine fails, its error is raised.
        """
        waiting = iter(prompts)
        missing = groups  # number of prompts still to start; a filtered group adds one
        under_way: set[asyncio.Task[Group]] = set()

        def start(count: int) -> int:
            before = len(under_way)
            for prompt in islice(waiting, count):
                under_way.add(asyncio.ensure_future(self._finish(prompt, request)))
            return len(under_way) - before

        try:
            missing -= start(min(missing, at_once or missing))
            while under_way:
                done, _ = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if task.result()[0].filtered:
                        missing += 1
                missing -= start(min(missing, len(done)))
                for task in done:
                    under_way.discard(task)
                    yield task.result()
        finally:
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)
            await self.rest()

    async def rest(self) -> None:
        """Free the engines' device memory."""
        await self.engines.rest()

    async def _finish(self, prompt: Prompt, request: Request) -> Group:
        if self.agents:
            group = await self.agents.play(prompt, request.spec, self._generate)
            request.sampled(prompt)
        else:
            group = await self._sample(prompt, request)
        return await request.on_group(group)

    async def _sample(self, prompt: Prompt, request: Request) -> Group:
        spec = request.spec
        tokens = prompt.tokens[-spec.prompt_room :]
        if len(tokens) < len(prompt.tokens):
            warn_once(
                "Prompts that leave no room for a response within --data.max_len are truncated to "
                f"their last {len(tokens)} tokens."
            )
        params = spec.params_for(prompt, len(tokens))
        generations = await self._generate(prompt, spec, tokens, params)
        request.sampled(prompt)
        extra_fields: Collection[str] = ()
        if self.reward:
            extra_fields = self.reward.extra_fields
        ask = partial(
            request_of,
            self.tokenizer,
            prompt.text,
            prompt.label,
            tokens,
            extra_fields=extra_fields,
        )
        questions = [ask(generation.tokens) for generation in generations]
        results = [RewardResult()] * len(questions)
        if self.reward:
            results = await self.reward.score(questions)
        group: Group = []
        for generation, question, result in zip(generations, questions, results, strict=True):
            builder = TrajectoryBuilder(tokens)
            builder.append_action(
                generation.tokens, generation.logprobs, generation.weight_versions
            )
            episode = builder.finish(
                prompt=prompt,
                sample_index=len(group),
                response_text=question.response,
                extra_logs=result.extra_logs,
                **self._outcome(generation, result),
            )
            group.append(episode)
        return group

    async def _generate(
        self, prompt: Prompt, spec: SamplingSpec, tokens: list[int], params: list[SamplingParams]
    ) -> list[Generation]:
        asked = time.perf_counter()
        generations = await self.engines.generate((spec.purpose, prompt.index), tokens, params)
        if spec.purpose != "train":
            return generations
        for generation in generations:
            # Only append, because `metrics` replaces the list in another thread.
            self._costs.append(
                SampleCost(
                    asked=asked,
                    seconds=generation.seconds,
                    prompt_tokens=len(tokens),
                    cached_tokens=generation.cached_tokens,
                )
            )
        return generations

    def metrics(self) -> dict[str, Metric]:
        """Return the cost of the training samples generated since the last call."""
        costs = self._costs
        self._costs = []
        return generation_metrics(costs) | self.engines.metrics()

    def _outcome(self, generation: Generation, result: RewardResult) -> dict[str, Any]:
        """Return how an episode ended: its stop reason, reward, score and error."""
        if generation.finish_reason not in ("stop", "length"):
            return {
                "stop_reason": StopReason.FAILED,
                "error": f"the sample failed in the engine: {generation.finish_reason}",
                "failure": Failure.ENGINE,
            }
        stop_reason = StopReason(generation.finish_reason)
        reward = result.reward
        score = result.score
        if result.error is not None:
            reward = score = self.fallback
            if self.fallback is None:
                stop_reason = StopReason.FAILED
        elif score is None:
            score = reward
        return {
            "stop_reason": stop_reason,
            "reward": reward,
            "score": score,
            "error": result.error,
            "failure": result.failure,
        }
