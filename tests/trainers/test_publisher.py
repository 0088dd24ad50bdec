"""A publication on the true stack: a policy of one process, and an engine of two that share each layer."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest
import ray

from openrlhf.config.rollout import VLLMConfig
from openrlhf.config.shared import DeepSpeedConfig
from openrlhf.distributed.buckets import PublicationError
from openrlhf.distributed.placement import HostGroup
from openrlhf.distributed.worker_group import Call, HostHandles, WorkerError, WorkerGroup, gather
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
    fleet.close()
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


def test_an_engine_that_died_is_named_and_the_trainer_lives_on(publisher: WeightPublisher) -> None:
    """It dies while the sender waits for it. Afterwards the module has no engine."""
    assert publisher.fleet and publisher.connected
    number = ray.get(publisher.fleet._engines[0].__ray_call__.remote(lambda engine: os.getpid()))
    os.kill(number, signal.SIGSTOP)
    threading.Timer(2.0, os.kill, (number, signal.SIGKILL)).start()
    began = time.monotonic()
    with pytest.raises(WorkerError, match=r"(?s)a process died while .* publish weight version 3.*vllm-0\.log"):
        publisher.publish(3)
    assert 2 <= time.monotonic() - began < publisher.timeout_s
    scored = publisher.policy.broadcast(PolicyWorker.weight_manifest, 4)
    assert gather(scored, timeout_s=60, doing="list its weights")[0].version == 4


class Members:
    """Two engines and the sender, as far as a publisher asks them."""

    def call(self, *_: object) -> list[Call]:
        return [Call(("engine 0",), ("vllm-0.log",)), Call(("engine 1",), ("vllm-1.log",))]

    def broadcast(self, *_: object) -> list[Call]:
        return [Call(("sender",), ("actor-0.log",))]


class Answers(WeightPublisher):
    """The sender's answer comes first; then each engine's."""

    def __init__(self, engines: Sequence[Exception]) -> None:
        super().__init__(cast(Any, Members()), cast(Any, Members()), transport="nccl", timeout_s=1)
        self.engines, self.connected = dict(zip(("engine 0", "engine 1"), engines, strict=True)), True

    def _gather(self, calls: Sequence[Call], doing: str) -> list[Any]:
        if doing == "list its weights":
            return ["manifest"]
        raise self.engines[calls[0].references[0]] if len(calls) == 1 else PublicationError("a member died")


def test_if_the_sender_notices_first_an_engine_that_died_is_named() -> None:
    survivor = PublicationError("engine 0 could not load version 1 and stays paused: a member died")
    died = WorkerError("a process died. Its log: vllm-1.log")
    with pytest.raises(WorkerError, match=r"vllm-1\.log"):
        Answers([survivor, died]).publish(1)


def test_if_the_sender_notices_first_the_errors_of_engines_are_told_too() -> None:
    errors = [PublicationError("engine 0: a member died"), PublicationError("engine 1: out of memory")]
    with pytest.raises(PublicationError, match="a member died; engine 0: a member died; engine 1: out of memory"):
        Answers(errors).publish(1)
