"""A publication on the true stack: a policy of one process, and an engine of two that share each layer."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from openrlhf.config.rollout import VLLMConfig
from openrlhf.config.shared import DeepSpeedConfig
from openrlhf.distributed.buckets import PublicationError
from openrlhf.distributed.placement import HostGroup
from openrlhf.distributed.worker_group import HostHandles, WorkerGroup, gather
from openrlhf.models.loading import LoadSpec
from openrlhf.rollout.engine_settings import EngineSettings
from openrlhf.rollout.fleet import Fleet
from openrlhf.rollout.sampling import SamplingParams
from openrlhf.trainers.publisher import Probe, WeightPublisher
from openrlhf.workers.base import MicroBatchLimits
from openrlhf.workers.policy import PolicyWorker
from tests.tiny import save_tiny_model
from tests.workers.policy_job import TEMPERATURE, policy_settings

pytestmark = pytest.mark.timeout(300)
HEADS: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}  # vLLM's kernels know heads of 32


@pytest.fixture(scope="module")
def publisher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WeightPublisher]:
    """The engine starts from other weights than the policy has."""
    folder = tmp_path_factory.mktemp("publisher")
    save_tiny_model(folder / "policy", seed=1, **HEADS)
    save_tiny_model(folder / "engine", seed=2, initializer_range=0.2, **HEADS)
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    hosts = HostHandles(HostGroup(name="actor", roles=("actor",), nodes=1, slots_per_node=1), on_gpus=False, threads=1)
    hosts.connect({"engine": DeepSpeedConfig(param_dtype="fp32"), "seed": 0}, log_dir=str(folder), timeout_s=120)
    policy = WorkerGroup(hosts, "actor")
    load = LoadSpec(path=str(folder / "policy"), param_dtype="fp32", attention="sdpa", packing=True, max_len=20)
    gather(
        policy.create(PolicyWorker, policy_settings(load, MicroBatchLimits(size=4))),
        timeout_s=120,
        doing="load the model",
    )
    engines = HostGroup(name="vllm", roles=("vllm",), nodes=1, slots_per_node=1)
    settings = EngineSettings(
        model=str(folder / "engine"),
        vllm=VLLMConfig(dtype="fp32", tensor_parallel_size=2, engine_args={"kv_cache_memory_bytes": 2**25}),
        max_model_len=20,
    )
    fleet = Fleet(engines, on_gpus=False)
    fleet.start(settings, log_dir=str(folder), timeout_s=200)
    fleet.wait()
    yield WeightPublisher(policy, fleet, transport="gloo", timeout_s=120)
    fleet.stop()
    ray.shutdown()


def test_an_engine_that_computes_something_else_is_found_and_one_with_the_same_weights_agrees(
    publisher: WeightPublisher,
) -> None:
    params = SamplingParams(temperature=TEMPERATURE, max_tokens=8, ignore_eos=True)
    probe = Probe(prompts=[[5, 6, 7], [9, 11, 20, 8, 40]], params=params, tolerance=0.01)
    assert publisher.fleet
    with pytest.raises(
        PublicationError, match=r"engine 0 gives the same tokens other log-probabilities.*mean difference"
    ):
        publisher.check_engines(publisher.fleet, probe)
    publisher.probe = probe
    publisher.publish(1)
    assert publisher.probe is None  # it was asked, and the engine agreed
    publisher.publish(2)  # in the same group
    publisher.check_engines(publisher.fleet, probe)
