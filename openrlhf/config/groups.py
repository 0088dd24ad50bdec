"""Groups of RL roles that share devices, in the order in which they are placed."""

from __future__ import annotations

from dataclasses import dataclass

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


def role_groups(config: RLFlags) -> list[RoleGroup]:
    """Return the groups of a run's roles. If the policy is trained, it is in the first group."""
    # The roles that have models, each with the section that sets its process count.
    roles: dict[str, GroupConfig | RewardConfig] = {}
    if not config.rollout.only:
        roles["actor"] = config.actor
        if config.has_reference:
            roles["ref"] = config.ref
        if config.local_teacher:
            roles["teacher"] = config.ref
        if config.estimator_traits.needs_critic:
            roles["critic"] = config.critic
    if config.reward.models:
        roles["reward"] = config.reward
    groups: list[RoleGroup] = []
    placed: set[str] = set()
    alone = [[role] for role in roles]
    for sharing in [*config.train.colocated, *alone]:
        together = tuple(role for role in roles if role in sharing and role not in placed)
        if together:
            placed.update(together)
            groups.append(RoleGroup(roles=together, size=roles[together[0]]))
    return groups
