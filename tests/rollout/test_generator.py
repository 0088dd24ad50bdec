"""The generator with fake engines: keys, seeds, the stream of groups, and generation cost."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Hashable, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

from openrlhf.config.rollout import RolloutConfig
from openrlhf.core.trajectory import Failure, Prompt
from openrlhf.observability.metrics import Mean, Metric, values
from openrlhf.rewards.protocol import Reward, RewardRequest, RewardResult
from openrlhf.rollout.background import BackgroundLoop, RolloutError
from openrlhf.rollout.fleet import mark_nonfinite
from openrlhf.rollout.generator import (
    Group,
    GroupTransform,
    Request,
    RolloutGenerator,
    SamplingSpec,
)
from openrlhf.rollout.measures import SampleCost, generation_metrics
from openrlhf.rollout.sampling import Generation, SamplingParams
from tests.streams import rollout

SPEC = SamplingSpec(
    purpose="train",
    rollout=RolloutConfig(n_samples_per_prompt=4, max_new_tokens=4),
    max_len=64,
    seed=0,
)
PROMPTS = [Prompt(index=index, text=f"prompt {index}", tokens=[index] * 40) for index in range(6)]


class Engines:
    """Engines whose samples consist of one token; the id of the token is the seed.

    Every sample of a prompt except the first finds the prompt in the cache.
    """

    def __init__(self, seconds: float = 1.0, slow: int | None = None) -> None:
        self.seconds, self.slow = seconds, slow  # prompt `slow` takes 101 s
        self.asked: list[Any] = []  # the key of each call

    async def generate(
        self, key: Hashable, tokens: list[int], params: list[SamplingParams]
    ) -> list[Generation]:
        self.asked.append(key)
        await asyncio.sleep(0)
        return [
            Generation(
                tokens=[each.seed or 0],
                logprobs=[-0.5],
                weight_versions=(0,),
                finish_reason="stop",
                stop_reason=None,
                cached_tokens=32 if sample else 0,
                seconds=101.0 if tokens[0] == self.slow else self.seconds,
            )
            for sample, each in enumerate(params)
        ]

    async def rest(self) -> None:
        pass

    def metrics(self) -> dict[str, Metric]:
        return {}


class Decoder:
    """A fake tokenizer with the methods that the generator needs."""

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return str(tokens)


def made(engines: Engines | None = None, reward: Reward | None = None) -> RolloutGenerator:
    tokenizer: Any = Decoder()
    return RolloutGenerator(engines or Engines(), tokenizer, reward)


def test_samples_of_a_prompt_share_a_key_that_evaluation_does_not_use() -> None:
    engines = Engines()
    rollout(made(engines), PROMPTS[:2], SPEC)
    rollout(made(engines), PROMPTS[:1], replace(SPEC, purpose="eval"))
    assert engines.asked == [("train", 0), ("train", 1), ("eval", 0)]


def test_sample_seed_does_not_depend_on_prompt_order() -> None:
    forwards = rollout(made(), PROMPTS, SPEC)
    backwards = rollout(made(), reversed(PROMPTS), SPEC)
    assert [t.tokens for t in forwards] == [t.tokens for t in backwards]
    assert len({t.tokens[-1] for t in forwards}) == len(PROMPTS) * SPEC.n_samples


def test_metrics_report_the_cost_of_training_samples_once_and_exclude_evaluation() -> None:
    generator = made()
    rollout(generator, PROMPTS, SPEC)
    rollout(generator, PROMPTS, replace(SPEC, purpose="eval"))
    assert values(generator.metrics())["timing/prefill_cached"] == pytest.approx(3 * 32 / (4 * 40))
    assert values(generator.metrics()) == {}


def test_tail_share_is_large_if_one_prompt_is_slow() -> None:
    prompts = [Prompt(index=index, text="", tokens=[index]) for index in range(12)]
    shares = []
    for engines in (Engines(), Engines(slow=7)):
        generator = made(engines)
        rollout(generator, prompts, SPEC)
        shares.append(values(generator.metrics())["timing/tail_share"])
    assert shares == pytest.approx([0, 100 / 101], abs=0.05)


# ---- the stream


def marked_by(rejects: Callable[[Group], bool]) -> GroupTransform:
    """Return an annotation function that marks the rejected groups as filtered."""

    async def marked(group: Group) -> Group:
        return [replace(sample, filtered=rejects(group)) for sample in group]

    return marked


def groups_of(**options: Any) -> list[int]:
    """Return the indices of the prompts whose groups a stream yields."""

    async def collect() -> list[int]:
        request = Request(
            spec=SPEC, step=1, on_group=marked_by(options.pop("rejects", lambda group: False))
        )
        return [
            group[0].prompt.index
            async for group in made().stream(iter(PROMPTS), request, **options)
        ]

    return asyncio.run(collect())


def test_stream_starts_as_many_prompts_as_requested_groups() -> None:
    assert sorted(groups_of(groups=4)) == [0, 1, 2, 3]
    assert sorted(groups_of(groups=9)) == list(range(6))


def test_stream_yields_a_filtered_group_and_starts_another_prompt() -> None:
    assert sorted(groups_of(groups=2, rejects=lambda group: group[0].prompt.index in (0, 2))) == [
        0,
        1,
        2,
        3,
    ]
    assert sorted(groups_of(groups=2, rejects=lambda group: True)) == list(range(6))


class Gate:
    """A slow reward function that counts running prompts and never returns for prompt 5."""

    extra_fields = ()

    def __init__(self) -> None:
        self.waiting, self.most, self.cancelled = 0, 0, 0

    async def check(self) -> None: ...

    async def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        try:
            await asyncio.sleep(0.01 if requests[0].prompt != "prompt 5" else 1000)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.waiting -= 1
        return [RewardResult(reward=1.0)] * len(requests)


@pytest.mark.parametrize("at_once", [1, 2, 4])
def test_stream_limits_the_number_of_concurrent_prompts(at_once: int) -> None:
    gate = Gate()

    async def collect() -> list[int]:
        stream = made(reward=gate).stream(
            PROMPTS[:5], Request(spec=SPEC, step=1), groups=5, at_once=at_once
        )
        return [group[0].prompt.index async for group in stream]

    assert sorted(asyncio.run(collect())) == [0, 1, 2, 3, 4]
    assert gate.most == at_once


def test_closing_a_stream_cancels_running_samples() -> None:
    gate = Gate()
    with closing(BackgroundLoop()) as loop:
        stream = loop.iterate(
            made(reward=gate).stream(PROMPTS, Request(spec=SPEC, step=1), groups=6), 60
        )
        assert len(list(islice(stream, 5))) == 5
        stream.close()
    assert (gate.cancelled, gate.waiting) == (1, 0)


def test_group_timeout_raises_an_error_that_names_the_flag() -> None:
    gate = Gate()
    with (
        closing(BackgroundLoop()) as loop,
        pytest.raises(RolloutError, match=r"within 0\.5 s.*--train\.step_timeout"),
    ):
        list(
            loop.iterate(
                made(reward=gate).stream(PROMPTS, Request(spec=SPEC, step=1), groups=6), 0.5
            )
        )
    assert gate.cancelled == 1


# ---- nonfinite log-probabilities


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_log_probability_fails_its_sample_and_names_the_engine(
    bad: float,
) -> None:
    good = Generation(
        tokens=[5, 6],
        logprobs=[-0.5, -1.0],
        finish_reason="stop",
        stop_reason=None,
        weight_versions=(0,),
    )
    assert mark_nonfinite(good, engine=3) is good
    broken = mark_nonfinite(replace(good, logprobs=[-0.5, bad]), engine=3)
    assert broken.logprobs == [0.0, 0.0]

    class Broken(Engines):
        async def generate(
            self, key: Hashable, tokens: list[int], params: list[SamplingParams]
        ) -> list[Generation]:
            return [broken if number else good for number, _ in enumerate(params)]

    fine, *failed = rollout(made(Broken()), PROMPTS[:1], SPEC)
    assert not fine.failed
    assert {t.failure for t in failed} == {Failure.ENGINE}
    for sample in failed:
        for fact in ("engine 3", "token 1", f"log-probability {bad}"):
            assert fact in (sample.error or "")


# ---- the generation tail, computed by hand


def tail_seconds(spans: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the duration of the tail, and how long at least one sample ran, both in seconds."""
    costs = [
        SampleCost(asked=start, seconds=end - start, prompt_tokens=1, cached_tokens=0)
        for start, end in spans
    ]
    share = generation_metrics(costs)["timing/tail_share"]
    assert isinstance(share, Mean)
    return share.sum, share.count


def test_tail_is_the_time_with_less_than_a_tenth_of_peak_concurrency() -> None:
    assert tail_seconds([(0, 1)] * 19 + [(0, 4)]) == (3, 4)
    assert tail_seconds([(0, 1)] * 18 + [(0, 4)] * 2) == (0, 4)  # 2 of 20 is exactly a tenth
    assert tail_seconds([(0, 1)] * 30 + [(0, 2)] + [(0, 5)]) == (4, 5)


def test_ten_samples_have_no_tail() -> None:
    assert tail_seconds([(0, 1)] * 9 + [(0, 100)]) == (0, 100)


def test_tail_share_excludes_idle_time() -> None:
    assert tail_seconds([(0, 1)] * 20 + [(3, 4)] * 20 + [(3, 5)]) == (1, 3)


def test_metrics_are_empty_if_nothing_was_sampled() -> None:
    assert values(generation_metrics([])) == {}


def test_cached_share_counts_tokens_and_not_samples() -> None:
    costs = [
        SampleCost(asked=0, seconds=1, prompt_tokens=p, cached_tokens=c)
        for p, c in ((300, 0), (300, 288), (10, 0))
    ]
    assert values(generation_metrics(costs))["timing/prefill_cached"] == pytest.approx(288 / 610)
