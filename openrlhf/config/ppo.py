"""Root of RL: the whole tree, and what rules and derived values ask of it."""

# ruff: noqa: RUF009  (defaults that are frozen dataclasses cannot be changed)
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from openrlhf.config import choices
from openrlhf.config.algorithm import (
    ActorConfig,
    AdvantageConfig,
    AlgoConfig,
    CorrectionConfig,
    CriticConfig,
    KLConfig,
    LossConfig,
    RefConfig,
    RLDataConfig,
    RLEngineConfig,
    RLEvalConfig,
    RLTrainConfig,
)
from openrlhf.config.ppo_derived import PPO_DERIVATIONS
from openrlhf.config.ppo_rules import PPO_RULES
from openrlhf.config.rollout import PlacementConfig, RewardConfig, RolloutConfig, VLLMConfig
from openrlhf.config.rules import SHARED_DERIVATIONS, SHARED_RULES, Request, derive, violations
from openrlhf.config.shared import CheckpointConfig, LoggerConfig, RootConfig, WandbConfig

__all__ = [
    "ActorConfig",
    "AdvantageConfig",
    "AlgoConfig",
    "CorrectionConfig",
    "CriticConfig",
    "KLConfig",
    "LossConfig",
    "PPOConfig",
    "PlacementConfig",
    "RLDataConfig",
    "RLEngineConfig",
    "RLEvalConfig",
    "RLTrainConfig",
    "RefConfig",
    "RewardConfig",
    "RolloutConfig",
    "VLLMConfig",
]


@dataclass(frozen=True, kw_only=True)
class PPOConfig(RootConfig):
    """Reinforcement learning."""

    run_name_prefix: ClassVar[str] = "ppo_"

    actor: ActorConfig = ActorConfig()
    critic: CriticConfig = CriticConfig()
    ref: RefConfig = RefConfig()
    reward: RewardConfig = RewardConfig()
    vllm: VLLMConfig = VLLMConfig()
    rollout: RolloutConfig = RolloutConfig()
    algo: AlgoConfig = AlgoConfig()
    train: RLTrainConfig = RLTrainConfig(micro_batch_size=1)
    data: RLDataConfig = RLDataConfig(max_samples=100_000_000)
    eval: RLEvalConfig = RLEvalConfig()
    ds: RLEngineConfig = RLEngineConfig()
    placement: PlacementConfig = PlacementConfig()
    ckpt: CheckpointConfig = CheckpointConfig(
        path="./ckpt/checkpoints_ppo_ray", max_mem=float("inf")
    )
    logger: LoggerConfig = LoggerConfig(wandb=WandbConfig(project="openrlhf_train_ppo"))

    @property
    def samples(self) -> int:
        """Samples of one iteration."""
        return self.rollout.batch_size * self.rollout.n_samples_per_prompt

    @property
    def actor_ranks(self) -> int:
        """Processes of the policy."""
        return self.actor.num_nodes * self.actor.num_gpus_per_node

    @property
    def data_parallel_ranks(self) -> int:
        """Ranks of the policy that get different samples."""
        return max(1, self.actor_ranks // (self.ds.ring_attn_size * self.ds.tensor_parallel_size))

    @property
    def estimator(self) -> choices.Estimator:
        """What the advantage estimator asks for."""
        return choices.ESTIMATORS[self.algo.advantage.estimator]

    @property
    def prefix_is_shared(self) -> bool:
        """Whether engines see a prefix twice: several samples, or turns of an agent."""
        return self.rollout.n_samples_per_prompt > 1 or self.train.agent_func_path is not None

    def resolve(
        self, explicit: frozenset[str] = frozenset(), *, command: str = "train_ppo_ray"
    ) -> tuple[Self, list[str]]:
        """A copy with all derived values, and notices. `explicit`: the paths the user gave."""
        request = Request(command=command, explicit=explicit)
        return derive(self, [*PPO_DERIVATIONS, *SHARED_DERIVATIONS], request)

    def check(self) -> list[str]:
        """What is wrong, one sentence each; for a resolved configuration."""
        return violations(self, [*SHARED_RULES, *PPO_RULES])
