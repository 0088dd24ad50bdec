"""The start of a run of RL. Libraries are imported while Ray and the processes start: together they take ten seconds."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from importlib import import_module
from typing import Any

from openrlhf.config.learning import ActorConfig, CriticConfig, RefConfig
from openrlhf.config.machine import quick_imports
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.rollout import RewardConfig
from openrlhf.distributed import placement
from openrlhf.distributed.cluster import ray_cluster
from openrlhf.rollout.engine_settings import engine_device


def run_ppo(config: PPOConfig) -> None:
    """Train as the flags say, on a running Ray or on a new one. A dry run starts nothing."""
    plan = plan_placement(config, engine_device())
    with ThreadPoolExecutor(1) as thread:
        first, rest = (thread.submit(imported, f"openrlhf.launch.{name}") for name in ("processes", "reinforcement"))
        with (
            nullcontext() if config.dry_run else ray_cluster(plan),
            closing(first.result().Processes(plan)) as processes,
        ):
            # GPUs that others may wait for are not held while data are read.
            if not config.dry_run and not plan.on_gpus:
                processes.start()
            rest.result().train(config, processes)


def imported(name: str) -> Any:
    """A module with large libraries behind it."""
    with quick_imports():
        return import_module(name)


def plan_placement(config: PPOConfig, kind: str) -> placement.Placement:
    """The host groups of a run: its roles, and which of them have devices in common."""
    roles: dict[str, ActorConfig | RefConfig | CriticConfig | RewardConfig] = {}
    roles["actor"] = config.actor
    if config.algo.kl.init_coef > 0:
        roles["ref"] = config.ref
    if config.estimator.needs_critic:
        roles["critic"] = config.critic
    if config.reward.model_name_or_path:
        roles["reward"] = config.reward
    if config.local_teacher:
        roles["teacher"] = config.ref
    together = [("actor", "ref", "teacher")] if config.train.colocate_actor_ref else []
    together += [("critic", "reward")] if config.train.colocate_critic_reward else []
    return placement.plan(
        {
            name: (role.num_nodes, role.num_gpus_per_node)
            for name, role in roles.items()
            if name == "reward" or not config.rollout.only
        },
        engines=0 if config.rollout.replay_dir else config.vllm.num_engines,
        on_gpus=kind == "cuda",
        colocated=together,
    )
