"""Estimates the time and communication of a step from the rates of devices and networks.

Compute: a forward pass takes 2 operations per active parameter and token, and 4·q·c per layer for
attention to c tokens on average (q: width of the queries; c is T/2 in a causal layer over T tokens,
and less with a sliding window); a backward pass takes twice as much, and gradient checkpointing
runs layers again (Korthikanti et al. 2022, arXiv:2205.05198; Narayanan et al. 2021,
arXiv:2104.04473). The output layer runs only where logits are needed, and always runs again in the
backward pass. With adapters, a backward pass takes as many operations as a forward pass.
Communication: ZeRO's communication volumes are from Rajbhandari et al. 2020 (arXiv:1910.02054).
Generation is limited by memory bandwidth: each token reads the weights and the KV cache once (Pope
et al. 2022, arXiv:2211.05102).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from openrlhf.planning.cluster import Cluster
from openrlhf.planning.constants import CUDA
from openrlhf.planning.engines import cache_bytes_per_token, predict_engine
from openrlhf.planning.memory import LIVE_PARAMETERS
from openrlhf.planning.roles import EngineRole, ModelRole
from openrlhf.planning.shapes import ModelShape
from openrlhf.planning.trained import local_size
from openrlhf.planning.usage import Instant

# Share of the data sheet's matrix-product rate achieved by training.
# A100s achieve 45 to 70 % in published runs (docs/planning.md).
# Faster devices with similar memory achieve less.
EFFICIENCY = 0.55
NEW_EFFICIENCY = 0.45
NEWER_THAN = 600.0  # TFLOP/s
MEMORY_EFFICIENCY = 0.6  # the share of the memory bandwidth that decoding achieves
NETWORK = 25.0  # GB/s per device and direction to other machines: one 200 Gbit/s adapter each
HIDDEN = 0.5  # the share of the computation time that can overlap with communication
HOST_BANDWIDTH = 100.0  # GB/s of a machine's CPU memory, which limits CPU Adam
PCIE = 20.0  # GB/s per device
ADAM_BYTES = 28  # bytes that CPU Adam reads and writes per weight: gradient, masters, moments
MOST_SEQUENCES = 256  # vLLM's default max_num_seqs


@dataclass(frozen=True, kw_only=True)
class TrainingTime:
    """The estimated time of one model's optimizer step."""

    compute: float  # seconds
    communication: float  # seconds, ignoring overlap with computation
    optimizer: float  # seconds, if the optimizer is offloaded
    sent_bytes: float  # per device

    @property
    def seconds(self) -> float:
        """The duration of the step, in which communication overlaps with computation."""
        exposed = max(0.0, self.communication - HIDDEN * self.compute)
        return self.compute + exposed + self.optimizer


def rate(cluster: Cluster) -> float:
    """Return how many operations per second one device achieves in matrix products."""
    teraflops = cluster.rates.teraflops
    efficiency = NEW_EFFICIENCY if teraflops > NEWER_THAN else EFFICIENCY
    return teraflops * 1e12 * efficiency


def layer_operations(role: ModelRole | EngineRole, length: int) -> float:
    """Return the operations per token of the decoder layers, in sequences of `length` tokens."""
    shape = role.shape
    layers = shape.active_parameters - shape.head_parameters
    return 2 * layers + _attention_operations(shape, length)


def _attention_operations(shape: ModelShape, length: int) -> float:
    """Return the operations per token of the products of queries, keys and values."""
    context = 0.0  # number of tokens that a token attends to, summed over the layers
    for window in shape.windows:
        seen = min(window or length, length)
        context += seen - seen**2 / (2 * length)
    return 4 * shape.queries * context


def _rank_operations(role: ModelRole, length: int) -> float:
    """Return the operations per token of the decoder layers on one rank.

    Tensor parallelism divides attention and dense layers, but not experts.
    """
    whole = layer_operations(role, length)
    if role.tp == 1:
        return whole
    saved = (1 - 1 / role.tp) * _attention_operations(role.shape, length)
    for weight in role.shape.weights:
        saved += 2 * (weight.numel - local_size(role, weight))
    return whole - saved


def head_operations(role: ModelRole | EngineRole) -> float:
    """Return the operations of the output layer per scored token."""
    return 2 * role.shape.head_parameters


def gather_seconds(size: float, cluster: Cluster, ranks: int) -> float:
    """Return the time in seconds that `ranks` devices take to receive `size` bytes each.

    Each network adapter of a machine receives a different part, and the devices then exchange these
    parts.
    """
    if ranks == 1:
        return 0.0
    inside = size / (cluster.rates.link * 1e9)
    if ranks <= cluster.per_node:
        return inside
    return max(inside, size / (cluster.per_node * NETWORK * 1e9))


def layer_exchange(
    role: ModelRole, cluster: Cluster, *, tokens: float, all_reduces: float, rounds: float
) -> tuple[float, float]:
    """Return the bytes that a rank exchanges inside layers for `tokens` tokens, and the seconds.

    Tensor parallelism reduces the states twice per layer in each of `all_reduces` passes. In each
    of `rounds`, a layer's keys and values travel around the ring.
    """
    states = role.width * tokens * role.shape.layers
    reduced = passed_on = 0.0
    if role.tp > 1:
        reduced = 4 * all_reduces * states * role.shape.hidden
    if role.sp > 1:
        passed_on = rounds * states * 2 * role.shape.keys / role.tp * (role.sp - 1)
    seconds = gather_seconds(reduced, cluster, role.tp)
    seconds += gather_seconds(passed_on, cluster, role.sp)
    return reduced + passed_on, seconds


def training_time(role: ModelRole, cluster: Cluster, *, tokens: int, length: int) -> TrainingTime:
    """Return the time of an optimizer step over `tokens` tokens in sequences of `length`."""
    passes = 3
    if role.lora_rank:
        passes = 2  # the weights have no gradients
    again = role.recomputed_layers / role.shape.layers
    scored = 1.0
    if role.training:
        scored = role.training.scored / role.training.tokens
    operations = (passes + again) * _rank_operations(role, length)
    operations += (passes + 1) * scored * head_operations(role)
    own = tokens / role.ranks  # because ranks that divide layers process the same tokens
    compute = own * operations / rate(cluster)
    weights = role.width * role.shape.parameters / role.tp
    gradients = weights
    if role.lora_rank:
        gradients = 0.0  # adapters are small
    moved = 2 * gradients  # gradients are reduced, and new weights are gathered
    if role.zero_stage == 2:
        moved = (role.window + 1) * gradients
    gathered = 0.0  # by backward passes
    if role.zero_stage == 3:
        moved = role.window * (weights + gradients)
        gathered = role.window * weights
    if role.ranks == 1:
        moved = gathered = 0.0
    holders = role.zpg if role.zpg > 1 else role.ranks
    communication = gather_seconds(moved, cluster, role.ranks)
    communication += gather_seconds(gathered, cluster, holders)
    # Forward, backward and recomputed passes; the ring's backward pass also moves the gradients.
    exchanged, exchanging = layer_exchange(
        role, cluster, tokens=own, all_reduces=2 + again, rounds=3 + again
    )
    return TrainingTime(
        compute=compute,
        communication=communication + exchanging,
        optimizer=_offloaded_seconds(role, cluster),
        sent_bytes=moved + gathered + exchanged,
    )


def _offloaded_seconds(role: ModelRole, cluster: Cluster) -> float:
    """Return the time in seconds that CPU Adam and its transfers take."""
    if not role.adam_offload or role.lora_rank:
        return 0.0
    owned = role.shape.parameters / role.tp / role.ranks
    machine = owned * min(cluster.per_node, role.ranks) * ADAM_BYTES / (HOST_BANDWIDTH * 1e9)
    return machine + owned * (4 + role.width) / (PCIE * 1e9)


def scoring_seconds(
    role: ModelRole, cluster: Cluster, *, tokens: int, length: int, heads: float | None = None
) -> float:
    """Return the time in seconds that forward passes over `tokens` tokens take.

    `heads` is the number of times the output layer runs per token. The default is derived from
    `role.scoring`.
    """
    assert role.scoring
    if heads is None:
        heads = role.scoring.scored / role.scoring.tokens
    own = tokens / role.ranks
    operations = _rank_operations(role, length) + heads * head_operations(role)
    compute = own * operations / rate(cluster)
    _, communication = layer_exchange(role, cluster, tokens=own, all_reduces=1, rounds=1)
    weights = role.width * role.shape.parameters / role.tp
    passes = math.ceil(own / role.scoring.tokens)
    if role.sharded and role.shape.parameters > LIVE_PARAMETERS:  # smaller models remain gathered
        communication += gather_seconds(passes * weights, cluster, role.ranks)
    return compute + max(0.0, communication - HIDDEN * compute)


def generation_seconds(
    engine: EngineRole, cluster: Cluster, *, engines: int, samples: int, prompt: int, answer: int
) -> float:
    """Return the time in seconds needed to generate `samples` answers of `answer` tokens each.

    Each engine generates its answers in rounds. A round has at most 256 sequences, and no more than
    fit into the engine's KV cache.
    """
    shape = engine.shape
    each = math.ceil(samples / engines)
    context = prompt + answer / 2
    of_token = cache_bytes_per_token(engine)
    usage = predict_engine(engine, CUDA, cluster.device_bytes)
    room = usage[Instant.GENERATE].kv_cache / (of_token * context)
    at_once = max(1, min(each, MOST_SEQUENCES, int(room)))
    rounds = math.ceil(each / at_once)
    cache = of_token * engine.devices
    # In a mixture of experts, a large batch uses all experts, so all weights are read.
    read = engine.width * shape.parameters + at_once * context * cache
    bandwidth = cluster.rates.memory_bandwidth * 1e9 * MEMORY_EFFICIENCY * engine.devices
    operations = layer_operations(engine, prompt + answer) + head_operations(engine)
    computed = at_once * operations / (rate(cluster) * engine.devices)
    decoding = rounds * answer * max(read / bandwidth, computed)
    prefill = each * prompt * operations / (rate(cluster) * engine.devices)
    return prefill + decoding
