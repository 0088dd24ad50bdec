"""Generation on the real stack: the generator, and vLLM engines on the CPU.

Transformers recomputes the engines' log-probabilities. Two engines differ only in their index, a
third uses speculative decoding, and a fourth prefills prompts in chunks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, cast

import pytest
import ray
import torch
from packaging.version import Version
from transformers import AutoModelForCausalLM, PreTrainedModel

from openrlhf.config.machine import installed
from openrlhf.config.rollout import RolloutConfig, VLLMConfig
from openrlhf.core.trajectory import Prompt, Trajectory
from openrlhf.observability.metrics import values
from openrlhf.rollout.background import BackgroundLoop, RolloutError
from openrlhf.rollout.engine import RequestRefused, RolloutEngine
from openrlhf.rollout.engine_settings import EngineSettings, engine_environment
from openrlhf.rollout.fleet import Fleet, Member
from openrlhf.rollout.generator import Request, RolloutGenerator, SamplingSpec
from openrlhf.rollout.routing import Router
from openrlhf.rollout.sampling import SamplingParams
from tests import streams
from tests.tiny import character_tokenizer, save_tiny_model

MAX_LEN, BLOCK = 320, 32
LOOKUP = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "twin": {},
    "speculating": {"enable_prefix_caching": False, "engine_args": {"speculative_config": LOOKUP}},
    "in parts": {"engine_args": {"enable_chunked_prefill": True, "max_num_batched_tokens": 64}},
}
SPEC = SamplingSpec(
    purpose="train",
    rollout=RolloutConfig(n_samples_per_prompt=8, max_new_tokens=16),
    max_len=MAX_LEN,
    seed=3,
)
if Version(installed("vllm").version) < Version("0.25"):
    # This vLLM version passes its CPU kernel an argument that the kernel does not accept.
    del KINDS["speculating"]
# Distinct prompts, each of which has six cache blocks and eight more tokens.
PROMPTS = [
    Prompt(index=i, text="", tokens=[4 + (j * (i + 3) + j // 7) % 44 for j in range(200)])
    for i in range(4)
]
# Repetitive prompts, in which n-gram drafting finds continuations.
REFRAINS = [Prompt(index=i, text="", tokens=[4 + i, 9, 14 + i, 20] * 12) for i in range(4)]


def settings_of(folder: str, kind: str) -> EngineSettings:
    """Return the settings for an engine of a given kind.

    On a CPU, samples with chunked prefill cannot have seeds.
    """
    flags: dict[str, Any] = {"dtype": "fp32", "enable_prefix_caching": True} | KINDS[kind]
    flags["engine_args"] = {"kv_cache_memory_bytes": 2**25} | flags.get("engine_args", {})
    return EngineSettings(
        model=folder, vllm=VLLMConfig(**flags), max_model_len=MAX_LEN, seeded=kind != "in parts"
    )


@pytest.fixture(scope="module")
def engines(tmp_path_factory) -> Iterator[dict[str, Any]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    ray.init(
        address="local",
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    folder = save_tiny_model(
        tmp_path_factory.mktemp("model"),
        "qwen2-untied",
        hidden_size=128,
        intermediate_size=160,
        initializer_range=0.08,
    )
    actor = ray.remote(RolloutEngine).options(
        num_cpus=0, runtime_env={"env_vars": engine_environment("cpu")}
    )
    handles = {kind: actor.remote(index) for index, kind in enumerate(KINDS)}
    ray.get(
        [handle.start.remote(settings_of(folder, kind)) for kind, handle in handles.items()],
        timeout=400,
    )
    yield handles | {"model": AutoModelForCausalLM.from_pretrained(folder).eval()}
    ray.shutdown()
    torch.set_num_threads(threads)


class Started(Fleet):
    """A fleet of engines that are already running."""

    def __init__(self, engines: list[Any]) -> None:
        self._members = {
            index: Member(index=index, slots=cast(Any, None), actor=engine, up=True)
            for index, engine in enumerate(engines)
        }
        self._router, self.settings = Router(self._members), settings_of("", "plain")
        self._failure = None


Draw = Callable[..., tuple[list[Trajectory], dict[str, float]]]


@pytest.fixture
def rollout(engines) -> Draw:
    """Generate samples with the named engines, and return the samples and the cost."""

    def draw(kinds: str, prompts: Sequence[Prompt], spec: SamplingSpec = SPEC):
        if "speculating" in kinds and "speculating" not in KINDS:
            pytest.skip("vLLM 0.24 does not support speculative decoding on a CPU")
        generator = made([engines[kind] for kind in kinds.split(", ")])
        return streams.rollout(generator, prompts, spec), values(generator.metrics())

    return draw


def made(handles: list[Any]) -> RolloutGenerator:
    return RolloutGenerator(Started(handles), character_tokenizer(), None)


@torch.no_grad()
def differences(
    model: PreTrainedModel, samples: Sequence[Trajectory], keep: int | None = None
) -> torch.Tensor:
    """Return |log π_engine − log π_model| for every sampled token.

    If `keep` is set, π_model is renormalized over its `keep` most likely tokens.
    """
    found = []
    for sample in samples:
        logits = model(torch.tensor([sample.tokens])).logits[0, :-1]
        if keep:
            logits = logits.masked_fill(logits < logits.topk(keep).values[:, -1:], -torch.inf)
        ours = logits.log_softmax(-1).gather(1, torch.tensor(sample.tokens[1:])[:, None]).squeeze(1)
        theirs = torch.tensor(sample.rollout_logprobs[1:])
        found.append((ours - theirs)[torch.tensor(sample.action_mask[1:])].abs())
    return torch.cat(found)


def tokens(samples: Sequence[Trajectory]) -> list[list[int]]:
    return [sample.tokens for sample in samples]


def test_samples_of_a_prompt_share_its_prefill(rollout, engines) -> None:
    samples, cost = rollout("plain", [replace(p, tokens=p.tokens[::-1]) for p in PROMPTS])
    # The first sample computes the prompt.
    # Each of the other seven samples computes only the 8 tokens after the prompt's six full blocks.
    assert cost["timing/prefill_cached"] == pytest.approx(7 * 6 * BLOCK / (8 * 200))
    assert differences(engines["model"], samples).max() < 1e-4


def test_every_sample_computes_the_prompt_without_a_prefix_cache(rollout) -> None:
    _, cost = rollout("speculating", PROMPTS)
    assert cost["timing/prefill_cached"] == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": 2.5},
        {"top_p": 0.0},
        {"stop_token_ids": [2**70]},
        {"stop_token_ids": [10**6], "min_tokens": 2},
        {"stop_token_ids": [-1]},
        {"min_tokens": 9},
        {"max_tokens": -1},
    ],
    ids=str,
)
def test_request_rejected_by_vllm_raises_an_error_and_leaves_the_engine_alive(
    engines, wrong: dict[str, Any]
) -> None:
    good = SamplingParams(max_tokens=4, seed=1)
    with pytest.raises(RequestRefused):
        ray.get(engines["plain"].generate.remote([5, 6], [replace(good, **wrong)]), timeout=240)
    [generation] = ray.get(engines["plain"].generate.remote([5, 6], [good]), timeout=240)
    assert len(generation.tokens) <= 4


def test_engine_cancels_samples_if_the_stream_times_out(engines) -> None:
    class Stuck:
        ended = ""

        async def generate(self, tokens: list[int], params: list[SamplingParams]) -> None:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                self.ended = "cancelled"
                raise

        async def wait_for_end(self) -> str:
            while not self.ended:
                await asyncio.sleep(0.05)
            return self.ended

    stuck: Any = ray.remote(Stuck).options(num_cpus=0).remote()
    stream = made([stuck]).stream(PROMPTS[:1], Request(spec=SPEC, step=1), groups=1)
    with closing(BackgroundLoop()) as loop, pytest.raises(RolloutError):
        list(loop.iterate(stream, 3))
    assert ray.get(stuck.wait_for_end.remote(), timeout=240) == "cancelled"


def test_seed_gives_the_same_samples_on_any_engine_in_any_order(rollout) -> None:
    alone, _ = rollout("plain", PROMPTS)
    assert tokens(rollout("twin", PROMPTS)[0]) == tokens(alone)
    assert tokens(rollout("plain, twin", PROMPTS)[0]) == tokens(alone)
    assert tokens(rollout("twin, plain", PROMPTS[::-1])[0]) == tokens(alone)
    one_by_one = [sample for prompt in PROMPTS for sample in rollout("twin", [prompt])[0]]
    assert tokens(one_by_one) == tokens(alone)
    assert len(set(map(tuple, tokens(alone)))) == len(alone)
    assert tokens(rollout("plain", PROMPTS, replace(SPEC, seed=4))[0]) != tokens(alone)


@pytest.mark.parametrize("kind", ["plain", "speculating"])
def test_log_probabilities_with_top_k_are_renormalized_over_the_kept_tokens(
    rollout, engines, kind
) -> None:
    samples, _ = rollout(kind, REFRAINS, replace(SPEC, rollout=replace(SPEC.rollout, top_k=5)))
    off = differences(engines["model"], samples, keep=5)
    assert off.max() < 1e-4 and off.mean() < 1e-5
    # The renormalized values differ from the log-probabilities over the full vocabulary.
    assert differences(engines["model"], samples).mean() > 0.1


def test_n_gram_drafts_do_not_change_the_log_probabilities(rollout, engines) -> None:
    spec = replace(SPEC, rollout=replace(SPEC.rollout, max_new_tokens=64))
    samples, _ = rollout("speculating", REFRAINS, spec)
    off = differences(engines["model"], samples)
    assert off.max() < 1e-4 and off.mean() < 1e-5
    # Accepting or rejecting drafts takes separate random draws, so the samples differ.
    assert tokens(samples) != tokens(rollout("plain", REFRAINS, spec)[0])


def test_seed_gives_the_same_samples_with_drafts_in_any_prompt_order(rollout) -> None:
    together, _ = rollout("speculating", REFRAINS)
    alone = [sample for prompt in REFRAINS[::-1] for sample in rollout("speculating", [prompt])[0]]
    assert sorted(tokens(alone)) == sorted(tokens(together))


def test_drafts_do_not_change_greedy_samples(rollout) -> None:
    greedy = replace(
        SPEC, purpose="eval", rollout=RolloutConfig(temperature=0.0, max_new_tokens=64)
    )
    assert tokens(rollout("speculating", REFRAINS, greedy)[0]) == tokens(
        rollout("plain", REFRAINS, greedy)[0]
    )


def test_chunked_prefill_does_not_change_the_log_probabilities(rollout, engines) -> None:
    samples, _ = rollout("in parts", PROMPTS, replace(SPEC, seed=None))
    off = differences(engines["model"], samples)
    assert off.max() < 1e-4 and off.mean() < 1e-5
