"""A publication on the true stack: a policy of one process, and an engine of two that share each
layer.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import ray

from openrlhf.cluster.placement import HostGroup
from openrlhf.cluster.ray_cluster import machines
from openrlhf.cluster.worker_group import Call, HostHandles, WorkerError, WorkerGroup, gather
from openrlhf.config.rollout import VLLMConfig
from openrlhf.config.shared import DeepSpeedConfig
from openrlhf.rollout.background import RolloutError
from openrlhf.rollout.engine import RolloutEngine
from openrlhf.rollout.engine_settings import EngineSettings
from openrlhf.rollout.fleet import Fleet
from openrlhf.rollout.sampling import SamplingParams
from openrlhf.trainers.publisher import Probe, WeightPublisher, told_by_all
from openrlhf.training.layout import RankLayout
from openrlhf.weights.manifest import PublicationError
from openrlhf.workers.base import MicroBatchLimits
from openrlhf.workers.policy import PolicyWorker
from tests.loading import load_spec
from tests.tiny import save_tiny_model
from tests.workers.policy_job import TEMPERATURE, Policy, role_settings

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
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    group = HostGroup(name="actor", roles=("actor",), nodes=1, per_node=1)
    hosts = HostHandles(group, machines(on_gpus=False), RankLayout(dp=1), on_gpus=False, threads=1)
    hosts.connect(
        {"engine": DeepSpeedConfig(param_dtype="fp32"), "seed": 0},
        log_dir=str(folder),
        timeout_s=300,
    )
    policy = WorkerGroup(hosts, "actor")
    load = load_spec(
        path=str(folder / "policy"), param_dtype="fp32", attention="sdpa", packing=True, max_len=20
    )
    gather(
        policy.create(Policy, role_settings(load, MicroBatchLimits(size=4))),
        timeout_s=300,
        doing="load the model",
    )
    engines = HostGroup(name="vllm", roles=("vllm",), per_node=1, devices=2)
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
    publisher = WeightPublisher(policy, fleet, transport="gloo", timeout_s=300)
    fleet.refit = publisher.refit
    yield publisher
    fleet.close()
    ray.shutdown()


def test_an_engine_that_computes_something_else_is_found_and_one_with_the_same_weights_agrees(
    publisher: WeightPublisher,
) -> None:
    params = SamplingParams(temperature=TEMPERATURE, max_tokens=8, ignore_eos=True)
    probe = Probe(prompts=[[5, 6, 7], [9, 11, 20, 8, 40]], params=params, tolerance=0.01)
    assert publisher.fleet
    with pytest.raises(
        PublicationError,
        match=r"engine 0 gives the same tokens other log-probabilities.*mean difference",
    ):
        publisher.check_engines(publisher.fleet, probe)
    publisher.probe = probe
    publisher.publish(1)
    assert publisher.probe is None  # it was asked, and the engine agreed
    publisher.publish(2)  # in the same group
    publisher.check_engines(publisher.fleet, probe)


@pytest.mark.verify
def test_an_engine_that_dies_while_weights_are_sent_starts_again_with_them(
    publisher: WeightPublisher,
) -> None:
    """Twice: there is one restart, so that the second death ends the fleet. Afterwards the module
    has no engine.
    """
    fleet, said = publisher.fleet, list[str]()
    assert fleet
    publisher.publish(2)  # the group is there
    fleet.say = said.append
    [member] = fleet.up
    for version, pause in ((3, 1.0), (4, 0.0)):
        number = ray.get(member.actor.__ray_call__.remote(lambda engine: os.getpid()))
        os.kill(number, signal.SIGSTOP)
        threading.Timer(pause, os.kill, (number, signal.SIGKILL)).start()
        if version == 3:
            publisher.publish(version)
            deadline = time.monotonic() + 120
            while len(said) < 2 and time.monotonic() < deadline:
                time.sleep(0.1)
            [[sample]] = gather(
                [member.call(RolloutEngine.generate, [5, 6], [SamplingParams(max_tokens=2)])],
                timeout_s=60,
                doing="sample",
            )
            assert sample.weight_versions == (3,)
            assert re.match(
                r"Engine 0 was lost \(.*\)\. Restart 1 of 1; its log: .*vllm-0\.log", said[0]
            )
            assert re.match(r"Engine 0 serves again after [\d.]+ s\.", said[1])
        else:
            with pytest.raises(
                RolloutError,
                match=r"engine 0 was lost after 1 restart\(s\) \(--vllm\.max_restarts 1\)",
            ):
                publisher.publish(version)
    scored = publisher.policy.broadcast(PolicyWorker.weight_manifest, 5)
    assert gather(scored, timeout_s=60, doing="list its weights")[0].version == 5


def test_if_the_sender_notices_first_the_errors_of_engines_are_told_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: list[Exception] = [
        PublicationError("engine 1: out of memory"),
        WorkerError("engine 0 died"),
    ]
    calls = [Call((), ()) for _ in answers]

    def gather(asked: Sequence[Call], **_: object) -> None:
        raise answers[next(place for place, call in enumerate(calls) if call is asked[0])]

    monkeypatch.setattr("openrlhf.trainers.publisher.gather", gather)
    told = told_by_all(PublicationError("a member died"), calls)
    assert str(told) == "a member died; engine 1: out of memory"
