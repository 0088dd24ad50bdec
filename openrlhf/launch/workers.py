"""Loads the models of an RL run: a group of workers for each role that the run has."""

from collections.abc import Sequence

from openrlhf.cluster.worker_group import Call, HostHandles, WorkerGroup, wait_for
from openrlhf.config.ppo import PPOConfig
from openrlhf.launch import settings
from openrlhf.launch.processes import connect_hosts
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
    config: PPOConfig, host_groups: Sequence[HostHandles], *, prompts: int, log_dir: str
) -> dict[str, WorkerGroup]:
    """Connect the processes of every host group, and load the models of their roles.

    `prompts` is the number of training prompts. Returns the worker groups by role.
    """
    for hosts in host_groups:
        connect_hosts(config, hosts, log_dir=log_dir)
    groups: dict[str, WorkerGroup] = {}
    created: list[Call] = []
    for hosts in host_groups:
        for role in hosts.group.roles:
            worker, worker_settings = worker_of(role, config, prompts)
            groups[role] = WorkerGroup(
                hosts, role, attention_length=settings.attention_length_of(worker_settings)
            )
            created += groups[role].create(worker, worker_settings)
    wait_for(created, timeout_s=config.train.setup_timeout, doing="load the models")
    return groups


def worker_of(role: str, config: PPOConfig, prompts: int) -> ModelWorker:
    """Return the worker class and the settings of a role in a run with `prompts` prompts."""
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
