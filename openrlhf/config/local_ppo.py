"""Configuration of `train_ppo`: RL with all models on the devices of one machine, with the defaults
of earlier releases.
"""

from __future__ import annotations

from typing import Any

from openrlhf.config import algorithm, learning, machine, rollout, shared
from openrlhf.config.flags import amend
from openrlhf.config.ppo import PPOConfig


class LocalPPOConfig(PPOConfig):
    """Reinforcement learning on this machine: all models share its devices."""

    critic: learning.CriticConfig = learning.CriticConfig(value_clip=0.2)
    vllm: rollout.VLLMConfig = rollout.VLLMConfig(enable_sleep=True, gpu_memory_utilization=0.5)
    rollout: rollout.RolloutConfig = rollout.RolloutConfig(
        batch_size=512, micro_batch_size=8, max_new_tokens=1024
    )
    algo: algorithm.AlgoConfig = algorithm.AlgoConfig(
        advantage=algorithm.AdvantageConfig(lambd=0.95)
    )
    train: learning.RLTrainConfig = learning.RLTrainConfig(micro_batch_size=4, colocate_all=True)
    data: learning.RLDataConfig = learning.RLDataConfig()
    ckpt: shared.CheckpointConfig = shared.CheckpointConfig(path="./ckpt/checkpoints_ppo")

    def derived_values(self) -> dict[str, Any]:
        """Return the derived values, keyed by flag path. All models and engines use all GPUs."""
        gpus = self.given.get("actor.num_gpus_per_node") or machine.count_gpus() or 1
        own = self.unless_given(
            {
                "actor.num_gpus_per_node": gpus,
                "vllm.num_engines": max(1, gpus // max(1, self.vllm.devices)),
                "ds.enable_sleep": self.train.colocate_all and self.ds.zero_stage > 0,
            }
        )
        return own | PPOConfig.derived_values(amend(self, own))
