"""The generator with engines made by hand: what is asked of which engine, and what it cost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from openrlhf.observability.metrics import values
from openrlhf.rewards.budget import ErrorBudget, RewardErrors
from openrlhf.rewards.protocol import RewardRequest, RewardResult
from openrlhf.rollout.generator import RolloutGenerator, SamplingSpec
from openrlhf.rollout.measures import SampleCost, generation_metrics, tail_seconds
from openrlhf.rollout.sampling import Generation, SamplingParams
from openrlhf.trajectory import Failure, Prompt

SPEC = SamplingSpec(
    purpose="train", n_samples=4, temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=4, max_len=64, seed=0
)
PROMPTS = [Prompt(index=index, text=f"prompt {index}", tokens=[index] * 40) for index in range(6)]


class Engine:
    """The handle of an engine: answers with the seed, as a token; all but the first sample of a prompt find it cached."""

    def __init__(self, seconds: float = 1.0) -> None:
        self.generate, self.seconds = self, seconds
        self.asked: list[int] = []  # prompts

    async def remote(self, tokens: list[int], params: Sequence[SamplingParams]) -> list[Generation]:
        self.asked.append(tokens[0])
        await asyncio.sleep(0)
        return [
            Generation(
                tokens=[each.seed or 0],
                logprobs=[-0.5],
                weight_versions=(0,),
                finish_reason="stop",
                stop_reason=None,
                cached_tokens=32 if sample else 0,
                seconds=self.seconds,
            )
            for sample, each in enumerate(params)
        ]


class Decoder:
    """All of a tokenizer that is needed."""

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return str(tokens)


@pytest.fixture
def made() -> Iterator[Any]:
    generators: list[RolloutGenerator] = []

    def make(*engines: Engine) -> RolloutGenerator:
        tokenizer: Any = Decoder()
        generators.append(
            RolloutGenerator(engines, tokenizer, None, errors=ErrorBudget(max_error_rate=1.0), timeout_s=60)
        )
        return generators[-1]

    yield make
    for generator in generators:
        generator.close()


def test_prompts_are_spread_and_one_that_comes_again_goes_where_it_was(made) -> None:
    engines = [Engine(), Engine()]
    generator = made(*engines)
    generator.rollout(PROMPTS, SPEC)
    generator.rollout(reversed(PROMPTS), SPEC)
    assert [engine.asked for engine in engines] == [[0, 2, 4, 4, 2, 0], [1, 3, 5, 5, 3, 1]]


def test_a_sample_has_one_seed_whatever_the_number_of_engines_and_the_order(made) -> None:
    alone = made(Engine()).rollout(PROMPTS, SPEC)
    spread = made(*(Engine() for _ in range(3))).rollout(reversed(PROMPTS), SPEC)
    assert [t.tokens for t in alone] == [t.tokens for t in spread]
    assert len({t.tokens[-1] for t in alone}) == len(PROMPTS) * SPEC.n_samples


def test_what_the_training_samples_cost_is_told_once_and_evaluation_is_no_part_of_it(made) -> None:
    generator = made(Engine())
    generator.rollout(PROMPTS, SPEC)
    generator.rollout(PROMPTS, replace(SPEC, purpose="eval"))
    assert values(generator.metrics())["timing/prefill_cached"] == pytest.approx(3 * 32 / (4 * 40))
    assert values(generator.metrics()) == {}


class Broken:
    """A reward that fails for the first two prompts, and never comes for the others."""

    async def check(self) -> None: ...

    async def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        if int(requests[0].prompt) > 1:
            await asyncio.sleep(1000)
        return [RewardResult(error="it broke", failure=Failure.EXCEPTION)] * len(requests)


def test_a_batch_is_given_up_once_too_many_have_failed_whatever_becomes_of_the_others() -> None:
    tokenizer: Any = Decoder()
    errors = ErrorBudget(max_error_rate=0.1)
    generator = RolloutGenerator([Engine()], tokenizer, Broken(), errors=errors, timeout_s=60)
    prompts = [Prompt(index=index, text=str(index), tokens=[index]) for index in range(8)]
    finished = generator.rollout(prompts, SPEC, may_end_early=True)
    generator.close()
    assert {t.prompt.index for t in finished} <= {0, 1}
    assert len(finished) > 0.1 * len(prompts) * SPEC.n_samples
    with pytest.raises(RewardErrors, match="it broke"):
        errors.check(finished)


def test_one_slow_engine_is_a_long_tail(made) -> None:
    fast, slow = made(*(Engine() for _ in range(12))), made(*(Engine() for _ in range(11)), Engine(seconds=101.0))
    prompts = [Prompt(index=index, text="", tokens=[index]) for index in range(12)]
    shares = []
    for generator in (fast, slow):
        generator.rollout(prompts, SPEC)
        shares.append(values(generator.metrics())["timing/tail_share"])
    assert shares == pytest.approx([0, 100 / 101], abs=0.05)


# ---- the tail, by hand


def test_the_tail_is_when_less_than_a_tenth_as_many_run_as_at_the_peak() -> None:
    assert tail_seconds([(0, 1)] * 19 + [(0, 4)]) == (3, 4)
    assert tail_seconds([(0, 1)] * 18 + [(0, 4)] * 2) == (0, 4)  # a tenth is not less than a tenth
    assert tail_seconds([(0, 1)] * 30 + [(0, 2)] + [(0, 5)]) == (4, 5)


def test_a_few_samples_have_no_tail() -> None:
    assert tail_seconds([(0, 1)] * 9 + [(0, 100)]) == (0, 100)


def test_time_in_which_nothing_runs_does_not_count() -> None:
    assert tail_seconds([(0, 1)] * 20 + [(3, 4)] * 20 + [(3, 5)]) == (1, 3)


def test_nothing_sampled_is_no_number() -> None:
    assert values(generation_metrics([])) == {}


def test_the_cached_share_counts_tokens_and_not_samples() -> None:
    costs = [
        SampleCost(asked=0, seconds=1, prompt_tokens=p, cached_tokens=c) for p, c in ((300, 0), (300, 288), (10, 0))
    ]
    assert values(generation_metrics(costs))["timing/prefill_cached"] == pytest.approx(288 / 610)
