"""The Ray processes that host a command's models."""

from collections.abc import Sequence
from contextlib import ExitStack

from openrlhf.cluster.placement import HostGroup, Machine, Placement
from openrlhf.cluster.ray_cluster import places_now
from openrlhf.cluster.worker_group import HostHandles
from openrlhf.config.machine import openmp_threads
from openrlhf.config.shared import DeepSpeedConfig
from openrlhf.rollout.fleet import Fleet
from openrlhf.training.layout import RankLayout


class Processes:
    """The processes of a run.

    After `start`, the processes import their libraries in the background.
    """

    def __init__(self, plan: Placement, ds: DeepSpeedConfig) -> None:
        self.plan = plan
        self.ds = ds
        self.fleet: Fleet | None = None
        self.hosts: list[HostHandles] = []
        self._ends = ExitStack()

    def start(self) -> None:
        """Start the processes, unless they are already running."""
        if self.hosts or self.fleet:
            return
        places = places_now(self.plan)
        on_gpus = self.plan.on_gpus
        by_name: dict[str, HostHandles] = {}
        for group in self.plan.groups:
            machines = places[group.name]
            if group.name == "vllm":
                shared = by_name.get(group.shares or "")
                self.fleet = Fleet(group, machines, on_gpus=on_gpus, hosts=shared)
                self._ends.callback(self.fleet.close)
            else:
                hosts = make_hosts(group, machines, self.ds, on_gpus=on_gpus)
                by_name[group.name] = hosts
                self.hosts.append(hosts)
                self._ends.callback(hosts.close)

    def close(self) -> None:
        """Stop all processes and release their slots."""
        self._ends.close()


def make_hosts(
    group: HostGroup, machines: Sequence[Machine], ds: DeepSpeedConfig, *, on_gpus: bool
) -> HostHandles:
    """Create the processes of `group` on the given machines. Do not connect the processes yet."""
    layout = RankLayout.from_flags(ds, processes=group.processes)
    threads = openmp_threads(group.most_per_machine)
    return HostHandles(group, machines, layout, on_gpus=on_gpus, threads=threads)
