"""The processes that a command keeps on its devices: rollout engines, and the hosts of its models."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError

from openrlhf.distributed.placement import HostGroup, actor_options, reserve
from openrlhf.distributed.worker_group import HostHandles, gather
from openrlhf.launch.settings import Sampling
from openrlhf.rollout.engine import EngineError, RolloutEngine
from openrlhf.rollout.engine_settings import EngineSettings, engine_environment
from openrlhf.rollout.generator import RolloutError


class EngineGroup:
    """Engine actors on the slots of `group`, one on each. They start side by side, which takes a while: `wait` for them."""

    def __init__(self, group: HostGroup, settings: EngineSettings, *, log_dir: str, timeout_s: float) -> None:
        on_gpus = settings.device == "cuda"
        self.timeout_s = timeout_s
        self.logs = [f"{log_dir}/{group.name}-{index}.log" for index in range(group.slots)]
        self._reserved = reserve(group, on_gpus=on_gpus, timeout_s=timeout_s)
        engine = ray.remote(RolloutEngine)
        self.actors: list[Any] = [
            engine.options(
                **actor_options(self._reserved, index, on_gpus=on_gpus),
                max_concurrency=4096,
                runtime_env={"env_vars": engine_environment(settings.device)},
            ).remote(settings, index, log)
            for index, log in enumerate(self.logs)
        ]
        self._starting = [actor.start.remote() for actor in self.actors]

    def wait(self) -> None:
        """Return when all of them serve. Raises EngineError or WorkerError."""
        gather(self._starting, timeout_s=self.timeout_s, doing="start the engines", logs=self.logs)

    @contextmanager
    def naming_logs(self) -> Iterator[None]:
        """Within it, an engine's failure is a RolloutError that names the logs."""
        try:
            yield
        except (RayActorError, EngineError) as error:
            raise RolloutError(f"an engine failed: {error}. Logs: {', '.join(self.logs)}") from error

    def stop(self) -> None:
        """Free the devices' memory, for others that come now."""
        stopping = [actor.stop.remote() for actor in self.actors]
        gather(stopping, timeout_s=self.timeout_s, doing="end the engines", logs=self.logs)

    def close(self) -> None:
        """End the processes and give their slots back."""
        for actor in self.actors:
            ray.kill(actor)
        ray.util.remove_placement_group(self._reserved)


def start_hosts(config: Sampling, group: HostGroup, *, on_gpus: bool, log_dir: str) -> HostHandles:
    """The processes of `group`, connected with each other, without a model yet."""
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
