"""Tests of the memory that a plan keeps free, because a prediction may be too low."""

from __future__ import annotations

import pytest

from openrlhf.planning.constants import CPU, CUDA, Constants
from openrlhf.planning.plan import Pool, Process, Tenant
from openrlhf.planning.usage import GIB, Instant, Usage


def pool_with(name: str, usage: Usage, constants: Constants) -> Pool:
    tenant = Tenant(name=name, usage=dict.fromkeys(Instant, usage))
    process = Process(tenants=(tenant,), count=1, framework=0)
    return Pool(
        name=name, capacity=100 * GIB, count=1, processes=(process,), constants=constants
    )  # fmt: skip


@pytest.mark.parametrize(("constants", "largest"), [(CPU, 93), (CUDA, 87)])
def test_more_is_reserved_on_a_gpu(constants: Constants, largest: int) -> None:
    """98 ÷ 1.05 and 98 ÷ 1.125 GiB of 100 may be used."""
    for size, fits in ((largest, True), (largest + 1, False)):
        pool = pool_with("policy", Usage(optimizer=size * GIB), constants)
        assert pool.fits == fits


def test_error_of_the_measured_step_is_covered() -> None:
    """The step of one run on an H100 took 10,206 MiB instead of 9,100."""
    assert 9100 * (1 + CUDA.reserve) >= 10206


def test_share_of_a_running_engine_needs_no_reserve() -> None:
    running = Usage(weights=30 * GIB, kv_cache=65 * GIB)
    assert pool_with("engine", running, CUDA).room == 3 * GIB
    assert pool_with("engine", running, CPU).room == pytest.approx(1.5 * GIB)
