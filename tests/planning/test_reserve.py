"""Tests for the memory that a plan keeps free in case its prediction is too low."""

from __future__ import annotations

import pytest

from openrlhf.planning.constants import CPU, CUDA, Constants
from openrlhf.planning.plan import Pool, Process, Tenant
from openrlhf.planning.usage import Instant, Usage
from openrlhf.units import GIB


def pool_with(name: str, usage: Usage, constants: Constants) -> Pool:
    tenant = Tenant(name=name, usage=dict.fromkeys(Instant, usage))
    process = Process(tenants=(tenant,), count=1, framework=0)
    return Pool(
        name=name, capacity=100 * GIB, count=1, processes=(process,), constants=constants
    )  # fmt: skip


@pytest.mark.parametrize(("constants", "largest"), [(CPU, 93), (CUDA, 87)])
def test_more_memory_is_reserved_on_a_gpu_than_on_a_cpu(constants: Constants, largest: int) -> None:
    """A plan may use 98 ÷ 1.05 of 100 GiB on a CPU, and 98 ÷ 1.125 of 100 GiB on a GPU."""
    for size, fits in ((largest, True), (largest + 1, False)):
        pool = pool_with("policy", Usage(optimizer=size * GIB), constants)
        assert pool.fits == fits


def test_memory_share_of_a_running_engine_needs_no_reserve() -> None:
    running = Usage(weights=30 * GIB, kv_cache=65 * GIB)
    assert pool_with("engine", running, CUDA).room == 3 * GIB
    assert pool_with("engine", running, CPU).room == pytest.approx(1.5 * GIB)
