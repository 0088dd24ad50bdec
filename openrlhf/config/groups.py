"""Groups of RL roles that share devices, in the order in which they are placed."""

from __future__ import annotations

from dataclasses import dataclass

from openrlhf.config.flags import value_at
from openrlhf.config.learning import RLFlags
from openrlhf.config.rollout import RewardConfig
from openrlhf.config.shared import GroupConfig


@dataclass(frozen=True, kw_only=True)
class RoleGroup:
    """Roles that share processes and devices, and the section that sets the number of processes."""

    roles: tuple[str, ...]
    size: GroupConfig | RewardConfig

    @property
    def processes(self) -> int:
        """The number of processes."""
        return self.size.num_nodes * self.size.num_gpus_per_node


def used_sections(config: RLFlags) -> dict[str, str]:
    """Map each role that has a model to the section that sets its number of processes."""
    roles: dict[str, str] = {}
    if not config.rollout.only:
        roles["actor"] = "actor"
        if config.has_reference:
            roles["ref"] = "ref"
        if config.local_teacher:
            roles["teacher"] = "ref"
        if config.estimator_traits.needs_critic:
            roles["critic"] = "critic"
    if config.reward.models:
        roles["reward"] = "reward"
    return roles


def role_groups(config: RLFlags) -> list[RoleGroup]:
    """Return the groups of a run's roles. If the policy is trained, it is in the first group."""
    roles = used_sections(config)
    groups: list[RoleGroup] = []
    placed: set[str] = set()
    alone = [[role] for role in roles]
    for sharing in [*config.train.colocated, *alone]:
        together = tuple(role for role in roles if role in sharing and role not in placed)
        if together:
            placed.update(together)
            size = value_at(config, roles[together[0]])
            groups.append(RoleGroup(roles=together, size=size))
    return groups
