"""Tests of the memory that a rank needs to gather and pack the weights of a publication."""

from __future__ import annotations

import pytest

from openrlhf.planning.constants import CPU, CUDA, Constants
from openrlhf.planning.memory import BUCKET_BYTES, RoleMemory
from openrlhf.planning.roles import ModelRole
from openrlhf.planning.shapes import ModelShape, shape_from_config
from openrlhf.units import MIB
from tests.planning.models import MEASURED, MODELS


def publication(shape: ModelShape, constants: Constants = CUDA, **layout: int) -> int:
    role = ModelRole(name="policy", shape=shape, trained=True, publishes=True, **layout)
    return RoleMemory(role, constants).publish_peak().publication


@pytest.mark.parametrize("constants", [CPU, CUDA], ids=["cpu", "cuda"])
def test_zero_3_gathers_buckets_that_are_limited_as_if_in_float32(constants: Constants) -> None:
    shape = shape_from_config(MEASURED)
    limit = BUCKET_BYTES[constants.device]
    largest = 2 * shape.largest_weight
    packed = max(limit, largest)
    assert publication(shape, constants) == packed
    sharded = publication(shape, constants, zero_stage=3, dp=4)
    assert sharded == packed + max(limit // 2, largest)


def test_tensor_parallel_ranks_gather_at_least_the_largest_split_weight() -> None:
    shape = shape_from_config(MODELS["llama2-70b"])
    embeddings = 2 * 32_000 * 8192
    split = 2 * 8192 * 28_672
    assert split > BUCKET_BYTES["cuda"]
    assert publication(shape, tp=8) == embeddings + split


def test_all_ranks_of_a_ring_check_each_sequence_alone() -> None:
    shape = shape_from_config(MEASURED)
    checks: list[int] = []
    for sp in (1, 2, 4, 8):
        role = ModelRole(name="policy", shape=shape, trained=True, sp=sp)
        memory = RoleMemory(role, CUDA)
        checks.append(memory.proof_peak().total - memory.idle_before_first_step().total)
    assert checks[0] > checks[1] == checks[2] == checks[3] > MIB
