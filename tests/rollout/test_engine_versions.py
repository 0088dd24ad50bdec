"""Differences between vLLM 0.24 and 0.31, tested with fakes of vLLM's classes.

Only one vLLM version is installed, and the test process does not import that version.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from openrlhf.rollout import engine_versions
from openrlhf.rollout.engine_settings import engine_environment
from openrlhf.rollout.engine_versions import (
    SampledVersions,
    check_reload,
    expert_kernel,
    heed_seeds_on_cpu,
    refusals,
)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch):
    """Replace an installed vLLM module with a fake that has the given contents."""

    def put(name: str, **contents: Any) -> None:
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)

    return put


@dataclass
class Output:
    """The core's output for one request in one step."""

    request_id: str
    new_token_ids: list[int]


class Client:
    """A fake of vLLM's AsyncLLM and of its engine-core client.

    A slow handler takes the core's outputs from a queue.
    """

    errored = False

    def __init__(self, requests: str) -> None:
        self.outputs_queue: asyncio.Queue[Any] = asyncio.Queue()
        self.engine_core = self.output_processor = self
        self.request_states = {
            f"{name}-inner": SimpleNamespace(external_req_id=name) for name in requests
        }

    async def get_output_async(self) -> Any:
        return await self.outputs_queue.get()

    async def handle(self) -> None:
        while True:
            await self.engine_core.get_output_async()
            for _ in range(9):
                await asyncio.sleep(0)

    def arrive(self, **tokens: list[int]) -> None:
        outputs = [Output(f"{name}-inner", ids) for name, ids in tokens.items()]
        self.outputs_queue.put_nowait(SimpleNamespace(outputs=outputs))


def sampled(requests: str, *phases: list[dict[str, list[int]]]) -> dict[str, tuple[int, ...]]:
    """Return the weight versions recorded for each request.

    In each phase some outputs arrive, and then the version of the weights changes.
    """

    async def run() -> dict[str, tuple[int, ...]]:
        client = Client(requests)
        versions = SampledVersions(client)
        handler = asyncio.create_task(client.handle())
        for version, phase in enumerate(phases, start=1):
            for outputs in phase:
                client.arrive(**outputs)
            await versions.switch(version)
        handler.cancel()
        found = {name: versions.pop(name) for name in requests}
        assert not any(versions.pop(name) for name in requests)  # no request's versions are kept
        return found

    return asyncio.run(run())


def test_sample_records_the_weight_versions_that_generated_its_tokens() -> None:
    both, first, second = {"a": [5], "b": [6]}, {"a": [7]}, {"b": [8, 9]}
    assert sampled("ab", [both, first], [second]) == {"a": (0,), "b": (0, 1)}


def test_tokens_received_before_a_publication_have_the_old_version() -> None:
    assert sampled("a", [{"a": [token]} for token in range(300)], []) == {"a": (0,)}


def test_sample_without_tokens_before_a_publication_has_only_the_new_version() -> None:
    assert sampled("ab", [{"a": [5], "b": []}], [{"b": [6]}], [], [{"b": [7]}]) == {
        "a": (0,),
        "b": (1, 3),
    }


def test_late_tokens_of_an_aborted_sample_are_ignored() -> None:
    assert sampled("a", [{"a": [5], "gone": [6]}]) == {"a": (0,)}


def test_version_switch_returns_if_the_engine_has_died() -> None:
    class Dead(Client):
        errored = True

    async def run() -> None:
        client = Dead("a")
        versions = SampledVersions(client)
        client.arrive(a=[5])
        await asyncio.wait_for(versions.switch(1), timeout=60)

    asyncio.run(run())


class Refusal(Exception):
    """A fake of vLLM's VLLMClientError, which is not a ValueError."""


def test_vllm_client_errors_count_as_rejected_requests(vllm) -> None:
    vllm("vllm", exceptions=SimpleNamespace(VLLMClientError=Refusal))
    assert issubclass(Refusal, refusals())


def test_value_errors_count_as_rejected_requests_in_vllm_without_client_errors(vllm) -> None:
    vllm("vllm", exceptions=SimpleNamespace())
    assert issubclass(ValueError, refusals()) and not issubclass(RuntimeError, refusals())


@dataclass
class OldInfo:
    kernel_tensors: Any = None


@dataclass
class NewInfo(OldInfo):
    kernel_non_persistent_buffers: set[str] = field(default_factory=set)


@pytest.mark.parametrize(
    ("hybrid", "quantised", "sharded", "old_refuses"),
    [
        (False, False, False, False),
        (True, False, False, True),
        (False, True, False, False),
        (False, False, True, False),
        (False, True, True, True),
    ],
)
def test_old_vllm_is_rejected_for_models_whose_buffers_it_would_lose(
    vllm, hybrid: bool, quantised: bool, sharded: bool, old_refuses: bool
) -> None:
    config = SimpleNamespace(
        model_config=SimpleNamespace(is_hybrid=hybrid),
        quant_config="fp8" if quantised else None,
        parallel_config=SimpleNamespace(tensor_parallel_size=1 + sharded),
    )
    place = "vllm.model_executor.model_loader.reload.types"
    vllm(place, LayerReloadingInfo=NewInfo)
    check_reload(config)
    vllm(place, LayerReloadingInfo=OldInfo)
    if old_refuses:
        with pytest.raises(ValueError, match=r"vLLM 0\.26"):
            check_reload(config)
    else:
        check_reload(config)


@pytest.mark.parametrize(
    ("version", "chosen"),
    [("0.24.0", "native"), ("0.28.1+cpu", "native"), ("0.29.0", "cpu"), ("0.32.0", "cpu")],
)
def test_old_vllm_on_a_cpu_uses_the_sampler_that_respects_every_seed(
    vllm, version: str, chosen: str
) -> None:
    class Sampler:
        forward_native, forward_cpu = "native", "cpu"

    vllm("vllm", __version__=version)
    vllm("vllm.v1.sample.ops.topk_topp_sampler", TopKTopPSampler=Sampler)
    heed_seeds_on_cpu()
    assert Sampler.forward_cpu == chosen


@pytest.mark.parametrize(
    ("version", "choice"), [("0.24.0", "0"), ("0.25.1", None), ("0.32.0", None), (None, None)]
)
def test_cuda_engine_in_vllm_0_24_uses_the_v1_model_runner(
    monkeypatch: pytest.MonkeyPatch, version: str | None, choice: str | None
) -> None:
    monkeypatch.setattr(
        engine_versions, "installed", lambda name: version and SimpleNamespace(version=version)
    )
    assert engine_environment("cuda").get("VLLM_USE_V2_MODEL_RUNNER") == choice
    assert "VLLM_USE_V2_MODEL_RUNNER" not in engine_environment("cpu")


def test_expert_kernel_finds_packed_experts_under_either_name() -> None:
    packed = object()
    assert expert_kernel(SimpleNamespace(moe_kernel=packed)) is packed
    assert expert_kernel(SimpleNamespace(moe_kernel=None, cpu_fused_moe=packed)) is packed
    assert expert_kernel(SimpleNamespace(moe_kernel=None)) is expert_kernel(None) is None
