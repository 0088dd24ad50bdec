"""Loads the models of a command: a group of workers for each role that the command has."""

from collections.abc import Callable, Sequence
from os.path import abspath

from openrlhf.cluster.worker_group import Call, HostHandles, WorkerGroup, wait_for
from openrlhf.config.ppo import PPOConfig
from openrlhf.launch import settings
from openrlhf.workers.base import RoleSettings
from openrlhf.workers.critic import CriticWorker
from openrlhf.workers.frozen import ReferenceWorker, RewardModelSettings, RewardWorker
from openrlhf.workers.policy import PolicyWorker

# A worker class, and the settings with which its workers are created.
ModelWorker = (
    tuple[type[PolicyWorker | CriticWorker | ReferenceWorker], RoleSettings]
    | tuple[type[RewardWorker], RewardModelSettings]
)


def start_workers(
    config: settings.SamplingCommand,
    host_groups: Sequence[HostHandles],
    choose: Callable[[str], ModelWorker],
    *,
    log_dir: str,
) -> dict[str, WorkerGroup]:
    """Join the processes of every host group into a process group, and load their roles' models.

    `choose` returns the worker class and the settings of a role. Returns the worker groups by role.
    """
    strategy = {
        "ds": config.ds,
        "seed": config.train.seed,
        "full_determinism": config.train.full_determinism_enable,
    }
    plugins = [abspath(path) for path in config.plugin]
    timeout_s = config.train.setup_timeout
    for hosts in host_groups:
        hosts.connect(strategy, log_dir=log_dir, timeout_s=timeout_s, plugins=plugins)
    groups: dict[str, WorkerGroup] = {}
    created: list[Call] = []
    for hosts in host_groups:
        for role in hosts.group.roles:
            worker, worker_settings = choose(role)
            groups[role] = WorkerGroup(
                hosts, role, attention_length=settings.attention_length_of(worker_settings)
            )
            created += groups[role].create(worker, worker_settings)
    wait_for(created, timeout_s=timeout_s, doing="load the models")
    return groups


def worker_of(config: PPOConfig, prompts: int, role: str) -> ModelWorker:
    """Return the worker class and the settings of a role in an RL run with `prompts` prompts."""
    match role:
        case "actor":
            # the policy is not trained in the critic's first steps
            steps = settings.optimizer_steps(config, prompts, after=config.frozen_steps)
            path = config.actor.model_name_or_path
            return PolicyWorker, settings.trained_settings(config, path, steps)
        case "ref":
            return ReferenceWorker, frozen_settings(config, config.actor.model_name_or_path)
        case "teacher":
            assert config.local_teacher
            return ReferenceWorker, frozen_settings(config, config.local_teacher)
        case "critic":
            assert config.critic.model_name_or_path
            steps = settings.optimizer_steps(config, prompts)
            path = config.critic.model_name_or_path
            return CriticWorker, settings.trained_settings(config, path, steps)
        case "reward":
            return RewardWorker, settings.reward_settings(config)
        case _:
            raise ValueError(f"the role {role} has no worker class")


def frozen_settings(config: PPOConfig, path: str) -> RoleSettings:
    """Return the settings of a reference or a teacher."""
    return RoleSettings(config=config, load=settings.load_spec(config, path))
