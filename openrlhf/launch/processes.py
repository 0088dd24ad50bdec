"""The processes on Ray that host the models of a command."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from openrlhf.config.ppo import PPOConfig
from openrlhf.distributed.placement import HostGroup, Placement
from openrlhf.distributed.worker_group import HostHandles
from openrlhf.rollout.fleet import Fleet

if TYPE_CHECKING:
    from openrlhf.launch.settings import Sampling


class Processes:
    """The processes of a run. They import their libraries from the start, while the launcher reads the data."""

    def __init__(self, config: PPOConfig, plan: Placement) -> None:
        groups = [group for group in plan.groups if group.name != "vllm"]
        self.hosts = [make_hosts(group, on_gpus=plan.on_gpus) for group in groups]
        self.fleet: Fleet | None = None
        if len(groups) < len(plan.groups):
            workers = config.vllm.tensor_parallel_size
            self.fleet = Fleet(plan.group_of("vllm"), on_gpus=plan.on_gpus, workers_per_engine=workers)

    def close(self) -> None:
        """End all processes, and release their slots."""
        for each in (*self.hosts, self.fleet):
            if each:
                each.close()


def make_hosts(group: HostGroup, *, on_gpus: bool) -> HostHandles:
    """The processes of `group`, not connected yet."""
    return HostHandles(group, on_gpus=on_gpus, threads=max(1, (os.cpu_count() or 1) // group.slots_per_node))


def connect_hosts(config: Sampling, hosts: HostHandles, *, log_dir: str) -> None:
    """Make the processes a process group, without models."""
    hosts.connect(
        {"engine": config.ds, "seed": config.train.seed, "full_determinism": config.train.full_determinism_enable},
        log_dir=log_dir,
        timeout_s=config.train.setup_timeout,
        plugins=[str(Path(path).expanduser().absolute()) for path in config.plugin],
    )
