"""Weight transports between GPU processes, and an engine that receives weights and sleeps.

The tests cover CUDA IPC on one GPU, NCCL between two GPUs, and publication to an engine.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from multiprocessing.pool import Pool
from typing import Any

import pytest
import torch
from transformers import Qwen2ForCausalLM

from openrlhf.rollout.sampling import SamplingParams
from openrlhf.training.devices import free_port
from openrlhf.weights.buckets import TensorSpec, bucket_hash, bucket_nbytes
from openrlhf.weights.manifest import WeightManifest
from openrlhf.weights.sender import WeightSender
from openrlhf.weights.transport import Transport, WeightGroup, join_group
from tests.gpu.place import DEVICE, TRANSPORT, save_model, started_engine
from tests.gpu.rehearsal import REHEARSAL

pytestmark = pytest.mark.gpu
SHAPES = {"a": (1000, 100), "b": (3,), "c": (777, 11)}
MANIFEST = WeightManifest(
    version=1,
    specs=tuple(TensorSpec(name=n, dtype=torch.bfloat16, shape=s) for n, s in SHAPES.items()),
    bucket_bytes=2**14,  # tensors a and c are larger, so there are three buckets
)


def new_group(transport: Transport, world_size: int = 2) -> WeightGroup:
    return WeightGroup(
        host="127.0.0.1",
        port=free_port(),
        world_size=world_size,
        transport=transport,
        name="gpu",
        timeout_s=60.0,
    )


def on(gpu: int) -> None:
    if not REHEARSAL:
        torch.cuda.set_device(gpu)


def send(group: WeightGroup, gpu: int) -> None:
    """Send random tensors and their hashes."""
    on(gpu)
    tensors = {name: torch.randn(shape, device=DEVICE) for name, shape in SHAPES.items()}
    sender = WeightSender()
    sender.join(group)
    sender.send(MANIFEST, tensors.items())
    sender.leave()


def take(group: WeightGroup, gpu: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the hashes of the received buckets and the hashes that the sender sent."""
    on(gpu)
    channel = join_group(group, 1)
    hashes = []
    for bucket in MANIFEST.buckets():
        buffer = torch.empty(bucket_nbytes(bucket), dtype=torch.uint8, device=DEVICE)
        channel.receive(buffer)
        hashes.append(bucket_hash(buffer))
    told = torch.empty(8 * len(hashes), dtype=torch.uint8, device=DEVICE)
    channel.receive(told)
    channel.close()
    return tuple(hashes), tuple(told.view(torch.int64).tolist())


@pytest.fixture
def processes() -> Iterator[Pool]:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        yield pool


def assert_arrives(processes: Pool, transport: Transport, gpus: tuple[int, int]) -> None:
    group = new_group(transport)
    taking = processes.apply_async(take, (group, gpus[1]))
    processes.apply_async(send, (group, gpus[0])).get(120)
    arrived, told = taking.get(120)
    assert arrived == told and len(set(told)) == 3


def test_weights_are_sent_to_another_process_on_the_same_gpu_by_cuda_ipc(processes):
    assert_arrives(processes, TRANSPORT, (0, 0))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs one GPU per rank")
def test_weights_are_sent_to_another_gpu_by_nccl(processes):
    assert_arrives(processes, "nccl", (0, 1))


def test_weight_hash_is_the_same_on_gpu_and_cpu():
    data = torch.randint(0, 256, (8 * 100_000,), dtype=torch.uint8)
    assert bucket_hash(data.to(DEVICE)) == bucket_hash(data)


@dataclass(frozen=True)
class Served:
    """A model on the trainer's device, and an engine that serves it."""

    model: Qwen2ForCausalLM
    engine: Any


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Share one engine between two tests, because an engine takes more than a minute to start."""
    folder = tmp_path_factory.mktemp("served")
    # With larger weights, rounding to bfloat16 alone changes log-probabilities by 0.1 nats.
    model = save_model(folder, num_hidden_layers=2, initializer_range=0.03)
    with started_engine(folder, enable_sleep=True) as engine:
        yield Served(model, engine)


def test_engine_on_the_gpu_of_the_trainer_serves_the_published_weights(
    served: Served, record_property: Callable[[str, object], None]
):
    import ray  # all other tests in the module run without Ray

    model, engine = served.model, served.engine
    loaded = deepcopy(model)
    record_property("logprob_gap_of_loaded_weights", gap(model, engine, versions=(0,)))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.02)
    group, sender = new_group(TRANSPORT), WeightSender()
    joining = engine.join.remote(group, 1)
    sender.join(group)
    ray.get(joining, timeout=60)
    specs = tuple(
        TensorSpec(name=name, dtype=torch.bfloat16, shape=tuple(p.shape))
        for name, p in model.named_parameters()
    )
    manifest = WeightManifest(version=1, specs=specs, bucket_bytes=2**24)
    began = time.perf_counter()
    receiving = engine.receive.remote(manifest)
    sender.send(manifest, model.named_parameters())
    ray.get(receiving, timeout=60)
    record_property("publication_s", round(time.perf_counter() - began, 3))
    ray.get(engine.resume.remote(), timeout=60)
    off = gap(model, engine, versions=(1,))
    record_property("logprob_gap_of_published_weights", off)
    stale = gap(loaded, engine, versions=(1,))
    record_property("logprob_gap_if_nothing_had_arrived", stale)
    assert off < 0.05 and off < stale / 5


def test_engine_frees_gpu_memory_while_asleep_and_wakes_on_request(
    served: Served, record_property: Callable[[str, object], None]
):
    import ray

    engine = served.engine
    params = [SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)]
    [before] = ray.get(engine.generate.remote([5, 6, 7], params), timeout=120)
    awake = free_gib()
    ray.get(engine.sleep.remote(), timeout=120)
    asleep = free_gib()
    record_property("gib_freed_by_sleep", round(asleep - awake, 2))
    [after] = ray.get(engine.generate.remote([5, 6, 7], params), timeout=120)
    assert after.tokens == before.tokens
    assert REHEARSAL or (asleep - awake > 5 and free_gib() < awake + 1)


def free_gib() -> float:
    """Return the free memory of the GPU, or 0 in a rehearsal."""
    return 0.0 if REHEARSAL else round(torch.cuda.mem_get_info()[0] / 2**30, 2)


def gap(model: Qwen2ForCausalLM, engine: Any, versions: tuple[int, ...]) -> float:
    """Return the mean difference between the engine's and the trainer's log-probabilities."""
    import ray

    params = [SamplingParams(max_tokens=64, ignore_eos=True)]
    [sample] = ray.get(engine.generate.remote([5, 6, 7], params), timeout=120)
    assert sample.weight_versions == versions
    with torch.no_grad():
        tokens = torch.tensor([[5, 6, 7, *sample.tokens]], device=DEVICE)
        logprobs = model(tokens).logits[0, 2:-1].float().log_softmax(-1)
    off = logprobs.gather(1, tokens[0, 3:, None]).squeeze(1).cpu() - torch.tensor(sample.logprobs)
    return round(float(off.abs().mean()), 5)
