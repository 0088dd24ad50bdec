"""Tests for publication with a policy process and a tensor-parallel engine on two processes."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import ray

from openrlhf.cluster.placement import HostGroup
from openrlhf.cluster.ray_cluster import machines
from openrlhf.cluster.worker_group import HostHandles, WorkerError, WorkerGroup, wait_for
from openrlhf.config.flags import ConfigError
from openrlhf.config.rollout import VLLMConfig
from openrlhf.config.shared import DeepSpeedConfig
from openrlhf.rollout.background import RolloutError
from openrlhf.rollout.engine import EngineError, RolloutEngine
from openrlhf.rollout.engine_settings import EngineSettings
from openrlhf.rollout.fleet import Fleet, Member
from openrlhf.rollout.sampling import SamplingParams
from openrlhf.trainers.engine_comparison import EngineComparison, Probe
from openrlhf.training.layout import RankLayout
from openrlhf.weights.manifest import PublicationError
from openrlhf.weights.publisher import WeightPublisher
from openrlhf.workers.base import MicroBatchLimits
from openrlhf.workers.policy import PolicyWorker
from tests.loading import load_spec
from tests.tiny import save_tiny_model
from tests.workers.policy_job import TEMPERATURE, Policy, role_settings

# vLLM's CPU kernels support a head dimension of 32.
HEADS: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


@dataclass(frozen=True)
class Stack:
    """A weight publisher and the processes that it calls."""

    policy: WorkerGroup
    fleet: Fleet
    publisher: WeightPublisher


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Start a policy, and an engine whose weights differ from the policy's."""
    folder = tmp_path_factory.mktemp("publisher")
    save_tiny_model(folder / "policy", seed=1, **HEADS)
    save_tiny_model(folder / "engine", seed=2, initializer_range=0.2, **HEADS)
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    group = HostGroup(name="actor", roles=("actor",), processes=1, per_machine=1)
    hosts = HostHandles(group, machines(on_gpus=False), RankLayout(dp=1), on_gpus=False, threads=1)
    hosts.connect(
        {"ds": DeepSpeedConfig(param_dtype="fp32"), "seed": 0},
        log_dir=str(folder),
        timeout_s=300,
    )
    policy = WorkerGroup(hosts, "actor")
    load = load_spec(
        path=str(folder / "policy"), param_dtype="fp32", attention="sdpa", packing=True, max_len=20
    )
    wait_for(
        policy.create(Policy, role_settings(load, MicroBatchLimits(size=4))),
        timeout_s=300,
        doing="load the model",
    )
    engines = HostGroup(name="vllm", roles=("vllm",), processes=1, devices=2)
    settings = EngineSettings(
        model=str(folder / "engine"),
        vllm=VLLMConfig(
            dtype="fp32",
            tensor_parallel_size=2,
            max_engines=1,
            max_restarts=1,
            engine_args={"kv_cache_memory_bytes": 2**25},
        ),
        max_model_len=20,
    )
    fleet = Fleet(engines, machines(on_gpus=False), on_gpus=False)
    fleet.start(settings, log_dir=str(folder), timeout_s=400)
    fleet.wait()
    publisher = WeightPublisher(
        policy,
        fleet,
        transport="gloo",
        timeout_s=300,
        update_timeout_s=300,
        wait_for=wait_for,
        failures=(WorkerError, EngineError),
    )
    fleet.refit = publisher.refit
    yield Stack(policy, fleet, publisher)
    fleet.close()
    ray.shutdown()


def test_engine_comparison_fails_for_different_weights_and_passes_after_publication(
    stack: Stack,
) -> None:
    params = SamplingParams(temperature=TEMPERATURE, max_tokens=8, ignore_eos=True)
    probe = Probe(prompts=[[5, 6, 7], [9, 11, 20, 8, 40]], params=params, tolerance=0.01)
    check = EngineComparison(policy=stack.policy, fleet=stack.fleet, probe=probe, timeout_s=300)
    with pytest.raises(PublicationError, match=r"engine 0 .* nats"):
        check.run()
    publisher = stack.publisher
    publisher.check = check.run
    publisher.publish(1)
    assert publisher.check is None  # the check ran once and passed
    publisher.publish(2)  # reuses the process group
    check.run()


@pytest.mark.verify
def test_model_that_vllm_rejects_is_a_configuration_error(stack: Stack, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "small-heads")
    settings = replace(
        stack.fleet.settings, model=str(tmp_path / "small-heads"), vllm=VLLMConfig(dtype="fp32")
    )
    group = HostGroup(name="other", roles=("vllm",), processes=1)
    fleet = Fleet(group, machines(on_gpus=False), on_gpus=False)
    fleet.start(settings, log_dir=str(tmp_path), timeout_s=400)
    try:
        with pytest.raises(ConfigError, match=r"small-heads: .* head size is 8"):
            fleet.wait()
    finally:
        fleet.close()


@pytest.mark.verify
def test_engine_killed_during_publication_restarts_with_the_new_weights(stack: Stack) -> None:
    """The engine may restart once. A second death closes the fleet, so this test must run last."""
    fleet = stack.fleet
    notes: list[str] = []
    stack.publisher.publish(2)  # creates the process group
    fleet.say = notes.append
    [member] = fleet.up
    kill_soon(member, pause_s=1.0)
    stack.publisher.publish(3)
    deadline = time.monotonic() + 600
    while len(notes) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    asked = member.call(RolloutEngine.generate, [5, 6], [SamplingParams(max_tokens=2)])
    [[sample]] = wait_for([asked], timeout_s=60, doing="sample")
    assert sample.weight_versions == (3,)
    assert re.search(r"ngine 0 .*1 of 1.*vllm-0\.log", notes[0])
    assert re.search(r"ngine 0 .*[\d.]+ s", notes[1])
    kill_soon(member, pause_s=0.0)
    with pytest.raises(RolloutError, match=r"engine 0 .*--vllm\.max_restarts 1"):
        stack.publisher.publish(4)
    listed = stack.policy.broadcast(PolicyWorker.weight_manifest, 5)
    assert wait_for(listed, timeout_s=60, doing="list its weights")[0].version == 5


def kill_soon(member: Member, pause_s: float) -> None:
    """Suspend an engine's process, and kill it after `pause_s` seconds."""
    process: Any = ray.get(member.actor.__ray_call__.remote(lambda engine: os.getpid()))
    os.kill(process, signal.SIGSTOP)
    threading.Timer(pause_s, os.kill, (process, signal.SIGKILL)).start()
