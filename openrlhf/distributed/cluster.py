"""The Ray that a run lives in: one that is there, or one of its own."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from openrlhf.distributed.placement import Placement, check_capacity

# Of a Ray that we start on a machine without GPUs, in bytes: batches are flat and small.
OBJECT_STORE_BYTES = 512 << 20


@contextmanager
def ray_cluster(plan: Placement) -> Iterator[None]:
    """Join the Ray of RAY_ADDRESS, of the job, or that `ray start` left on this machine; else start one for the run."""
    started = not ray.is_initialized()
    if started:
        _init_ray(plan)
    try:
        check_capacity(plan, ray.cluster_resources())
        yield
    finally:
        if started:
            ray.shutdown()


def _init_ray(plan: Placement) -> None:
    # Leave CUDA_VISIBLE_DEVICES of GPU-less actors alone.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:  # Not by address="auto": that also joins what another run has started for itself, and dies with it.
        ray.init(
            num_cpus=max(os.cpu_count() or 1, 4),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=None if plan.on_gpus else OBJECT_STORE_BYTES,
        )
    except ValueError:  # there is a cluster to join, and it has its resources already
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
