"""The processes that host the models of a command."""

import os
from pathlib import Path

from openrlhf.distributed.placement import HostGroup
from openrlhf.distributed.worker_group import HostHandles
from openrlhf.launch.settings import Sampling


def start_hosts(config: Sampling, group: HostGroup, *, on_gpus: bool, log_dir: str) -> HostHandles:
    """The connected processes of `group`, without models."""
    return HostHandles(
        group,
        on_gpus=on_gpus,
        threads=max(1, (os.cpu_count() or 1) // group.slots_per_node),
        log_dir=log_dir,
        timeout_s=config.train.setup_timeout,
        settings={
            "engine": config.ds,
            "seed": config.train.seed,
            "full_determinism": config.train.full_determinism_enable,
        },
        plugins=[str(Path(path).expanduser().absolute()) for path in config.plugin],
    )
