"""The start of a run of RL. Libraries are imported while Ray and the processes start: together they take ten seconds."""

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from importlib import import_module
from typing import Any

from openrlhf import termination
from openrlhf.config.flags import amend
from openrlhf.config.machine import quick_imports
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.rollout import RewardConfig
from openrlhf.config.shared import GroupConfig
from openrlhf.distributed.cluster import expected_machines, ray_cluster
from openrlhf.distributed.placement import HostGroup, Placement, engine_group
from openrlhf.distributed.worker_group import WorkerError
from openrlhf.rollout.engine_settings import engine_device

HOW_TO_GO_ON = (
    "If the run has written checkpoints, the same command with --ckpt.load_enable goes on from the newest; "
    "--train.max_restarts does that by itself."
)


def run_ppo(config: PPOConfig) -> None:
    """Train as the flags say, on a running Ray or on a new one. A dry run starts nothing."""
    plan = plan_placement(config, engine_device())
    if config.dry_run:
        plan.check(expected_machines(plan.on_gpus, config.placement.cluster))
    with ThreadPoolExecutor(1) as thread:
        first, rest = (thread.submit(imported, f"openrlhf.launch.{name}") for name in ("processes", "reinforcement"))
        with nullcontext() if config.dry_run else ray_cluster(plan):
            for restarts in range(config.train.max_restarts + 1):
                try:
                    with closing(first.result().Processes(plan)) as processes:
                        # GPUs that others may wait for are not held while data are read.
                        if not config.dry_run and not plan.on_gpus:
                            processes.start()
                        return rest.result().train(config, processes)
                except WorkerError as error:
                    if termination.asked():
                        raise
                    if restarts == config.train.max_restarts:
                        raise WorkerError(f"{error} {HOW_TO_GO_ON}") from error
                    more = f"Restart {restarts + 1} of {config.train.max_restarts} (--train.max_restarts)"
                    print(f"{error}\n{more}, from the newest checkpoint of the run if it has one.", file=sys.stderr)
                    config = amend(config, {"ckpt.load_enable": True})


def imported(name: str) -> Any:
    """A module with large libraries behind it."""
    with quick_imports():
        return import_module(name)


def plan_placement(config: PPOConfig, kind: str) -> Placement:
    """The host groups of a run: its roles, and which of them have devices in common."""
    roles: dict[str, GroupConfig | RewardConfig] = {}
    if not config.rollout.only:
        roles["actor"] = config.actor
        if config.has_reference:
            roles["ref"] = config.ref
        if config.local_teacher:
            roles["teacher"] = config.ref
        if config.estimator.needs_critic:
            roles["critic"] = config.critic
    if config.reward.models:
        roles["reward"] = config.reward
    groups: list[HostGroup] = []
    for sharing in [*config.train.colocated, *([role] for role in roles)]:
        together = tuple(role for role in roles if role in sharing and not any(role in group.roles for group in groups))
        if together:
            size = roles[together[0]]
            group = HostGroup(
                name="+".join(together),
                roles=together,
                nodes=size.num_nodes,
                per_node=size.num_gpus_per_node,
                wants=config.placement.wants(together),
            )
            groups.append(group)
    if not config.rollout.replay_dir:
        shares = groups[0].name if config.hybrid and not config.rollout.only else None
        groups.append(engine_group(config.vllm, "vllm", shares=shares, wants=config.placement.wants(["vllm"])))
    return Placement(groups=tuple(groups), on_gpus=kind == "cuda")
