"""RL configuration sections for models, training loop and data, and the tree of all RL flags."""

from __future__ import annotations

import math
from collections.abc import Iterator

from openrlhf.config import choices, shared
from openrlhf.config.algorithm import CORRECTION_DETAILS, AlgoConfig
from openrlhf.config.commands import Root
from openrlhf.config.flags import Unused, count, option, switch, unset
from openrlhf.config.optimizer import AdamConfig, OptimizerConfig
from openrlhf.config.places import Output
from openrlhf.config.rollout import (
    AGENT,
    FUNCTION,
    PlacementConfig,
    PromptConfig,
    RewardConfig,
    RolloutConfig,
    VLLMConfig,
    unused_by_agents,
    unused_by_rewards,
    unused_without,
)

# Phrases for notices about what a flag requires.
CRITIC = "a critic (--algo.advantage.estimator gae)"
FROZEN = (
    "a reference (--algo.kl.init_coef above 0, no --ds.lora.rank) or --algo.distill.teacher PATH"
)
REWARD_MODEL = "--reward.model_name_or_path"


class ActorConfig(shared.GroupConfig, shared.TrainedModelConfig, OptimizerConfig):
    """The policy; the reference is its initial copy."""

    policy_loss_type: str = option("ppo", "Policy loss.", choices=choices.POLICY_LOSSES)
    eps_clip: float = option(0.2, "Clip range of the ratio, both below and above 1.", gt=0)
    eps_clip_low_high: tuple[float, float] = unset(
        "Clip ranges below and above 1; unset: eps_clip for both.", ge=0
    )
    dual_clip: float | None = unset("Dual-clip bound of the loss for negative advantages.", gt=1)
    entropy_coef: float | None = unset(
        "Weight of the entropy bonus; 0: only log it; unset: do not compute it."
    )
    freeze_visual_encoder: bool = switch(
        "Train only the language part of a vision model.", not_yet="leave it out"
    )
    adam: AdamConfig = AdamConfig(lr=1e-6)


class CriticConfig(shared.GroupConfig, OptimizerConfig):
    """The critic (estimator gae)."""

    model_name_or_path: str | None = unset(
        "Folder or Hub name; unset: the first reward model, else the policy.", holds="model"
    )
    value_clip: float = option(0.5, "Clip range of the values.", gt=0)
    freezing_steps: int = option(-1, "Number of initial steps that train only the critic.", ge=-1)
    save_value_network: bool = switch("Export the critic at the end of the run.")
    adam: AdamConfig = AdamConfig(lr=9e-6)


class RefConfig(shared.GroupConfig):
    """The reference policy."""

    offload: bool = switch("Keep the reference in CPU memory between uses.")


class RLTrainConfig(shared.ProcessConfig, shared.TrainConfig):
    """Batches, epochs, seed, placement, pipeline."""

    num_episodes: int = count(1, "Number of epochs over the prompts.")
    dynamic_batch_enable: bool = switch(
        "Size micro-batches by tokens instead of samples; implies packing."
    )
    max_tokens_per_gpu: int = count(
        16192,
        "Maximum tokens in a dynamic micro-batch; a longer sample gets its own.",
        needs="dynamic_batch_enable",
    )
    colocate_actor_ref: bool = switch("Colocate policy and reference on the same devices.")
    colocate_critic_reward: bool = switch("Colocate critic and reward models on the same devices.")
    colocate_all: bool = switch("Colocate all models and the engines on the same devices.")
    async_enable: bool = switch("Generate and train at the same time.")
    async_queue_size: int = count(
        1,
        "Maximum number of batches being generated or waiting, not counting the one in training.",
        needs="async_enable",
    )
    max_staleness: int = unset(
        "Maximum age of a sample in weight versions; unset: train.async_queue_size.",
        ge=1,
        needs="async_enable",
    )
    partial_rollout_enable: bool = switch(
        "Publish weights during generation; unfinished samples continue with the new weights.",
        needs="async_enable",
    )
    max_restarts: int = option(
        0,
        "Maximum restarts of the run after a worker or a Ray instance started by the run dies.",
        ge=0,
    )
    publish_timeout: float = option(
        600.0, "Time limit in seconds for publishing weights to the engines.", gt=0
    )

    @property
    def colocated(self) -> list[tuple[str, ...]]:
        """Groups of roles that share devices. A run need not have all of these roles."""
        if self.colocate_all:
            return [("actor", "ref", "teacher", "critic", "reward")]
        groups: list[tuple[str, ...]] = []
        if self.colocate_actor_ref:
            groups.append(("actor", "ref", "teacher"))
        if self.colocate_critic_reward:
            groups.append(("critic", "reward"))
        return groups


class RLLoraConfig(shared.LoraConfig):
    """LoRA adapters, and the weights that are sent to the engines."""

    publish: str = option(
        "merged",
        "Weights to send to the engines: merged, or only the adapter.",
        choices=("merged", "adapter"),
        needs="rank",
    )

    @property
    def served_rank(self) -> int:
        """The rank of the adapter that is sent to engines; 0 if full weights are sent."""
        return self.rank if self.publish == "adapter" else 0


class RLDeepSpeedConfig(shared.LMDeepSpeedConfig):
    """DeepSpeed, precision and offloading of the trained models."""

    enable_sleep: bool = switch(
        "Move the training state to CPU memory between updates.", unless="adam_offload"
    )
    value_head_prefix: str = option(
        "score", "Name of the scalar head; a stored name takes precedence."
    )
    lora: RLLoraConfig = RLLoraConfig()

    @property
    def sleeps(self) -> bool:
        """True if the training state is kept in CPU memory between updates."""
        return self.enable_sleep and not self.offloads_optimizer

    def unused(self) -> Iterator[Unused]:
        """Yield the flags that have no effect with the current settings."""
        yield from super().unused()
        if self.nvme_path:
            yield Unused(["enable_sleep"], "with --nvme_path")


class RLDataConfig(PromptConfig, shared.DataConfig):
    """Tokenizer and prompts."""

    image_key: str = option("images", "Column with images.")
    max_images_per_prompt: int = option(
        0, "Maximum number of images per prompt; 0: text only.", ge=0, not_yet="use text prompts"
    )


class RLEvalConfig(shared.EvalConfig):
    """Evaluation by sampling responses to prompts."""

    temperature: float = option(0.6, "Temperature; 0: greedy.", ge=0, le=2, needs="dataset")
    n_samples_per_prompt: int = count(4, "Responses per prompt: the k of pass@k.", needs="dataset")
    at_start: bool = switch("Also evaluate before the first step.", needs="dataset")


class RLFlags(Root):
    """Reinforcement learning."""

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
    ds: RLDeepSpeedConfig = RLDeepSpeedConfig()
    placement: PlacementConfig = PlacementConfig()
    ckpt: shared.CheckpointConfig = shared.CheckpointConfig(
        path="./ckpt/checkpoints_ppo_ray", max_mem=float("inf")
    )
    logger: shared.LoggerConfig = shared.logger_of("openrlhf_train_ppo")

    @property
    def keeps_best(self) -> bool:
        """True if the checkpoint with the best evaluation result is kept. The default metric is
        pass@1.
        """
        return bool(self.eval.dataset) and self.ckpt.best_metric_key != "none"

    def further_places(self) -> list[Output]:
        """Return the critic's output folder if the run writes it."""
        exports = self.estimator_traits.needs_critic and self.critic.save_value_network
        if self.rollout.only or not exports:
            return []
        folder = f"{self.ckpt.output_dir}_critic"
        named = f"{folder} (--critic.save_value_network)"
        return [Output(named=named, path=folder, kind="model")]

    @property
    def samples(self) -> int:
        """The number of samples per iteration."""
        return self.rollout.batch_size * self.rollout.n_samples_per_prompt

    def updates_of(self, prompts: int) -> int:
        """Return the number of optimizer steps for a batch of this many prompts."""
        samples = prompts * self.rollout.n_samples_per_prompt
        return self.train.max_epochs * math.ceil(samples / self.train.batch_size)

    def step_sizes(self, prompts: int) -> list[int]:
        """Return the number of prompts in each step of the run if no prompt is filtered.

        An asynchronous step may span two epochs.
        """
        size = self.rollout.batch_size
        epochs = self.train.num_episodes
        if self.train.async_enable:
            prompts = prompts * epochs
            epochs = 1
        return [min(size, prompts - first) for first in range(0, prompts, size)] * epochs

    @property
    def frozen_steps(self) -> int:
        """The number of steps that train only the critic; 0 without a critic or with −1."""
        return max(0, self.critic.freezing_steps) if self.estimator_traits.needs_critic else 0

    @property
    def has_reference(self) -> bool:
        """True if a separate reference model is loaded. With adapters, the reference is the policy
        without its adapters.
        """
        return self.algo.kl.init_coef > 0 and not self.ds.lora.rank

    @property
    def needs_old_policy(self) -> bool:
        """True if the update needs the trainer's log π_old, even if the policy has no dropout.

        With one optimizer step and one epoch per batch, no KL in the reward, no correction and no
        teacher, the importance ratio is 1 by construction, and π_old has no other use.
        """
        if self.train.max_epochs != 1 or self.train.batch_size < self.samples:
            return True
        algo = self.algo
        return bool(algo.kl.in_reward or algo.advantage.corrects or algo.distill.teacher)

    @property
    def has_frozen_policy(self) -> bool:
        """True if a reference or a teacher is loaded."""
        return self.has_reference or self.local_teacher is not None

    @property
    def hybrid(self) -> bool:
        """True if the engines share devices with the models."""
        return self.train.colocate_all and not self.train.async_enable

    @property
    def actor_ranks(self) -> int:
        """The number of policy processes."""
        return self.actor.num_nodes * self.actor.num_gpus_per_node

    @property
    def data_slices(self) -> int:
        """The number of slices into which the policy processes divide a batch."""
        return self.ds.data_slices(self.actor_ranks)

    @property
    def estimator_traits(self) -> choices.EstimatorTraits:
        """Traits of the advantage estimator."""
        return self.algo.advantage.traits

    @property
    def policy_loss_traits(self) -> choices.LossTraits:
        """Traits of the policy loss."""
        return choices.POLICY_LOSSES[self.actor.policy_loss_type]

    @property
    def remote_teacher(self) -> str | None:
        """The teacher's name if the teacher is one of the remote engines."""
        teacher = self.algo.distill.teacher
        return teacher if teacher in dict(self.rollout.named_engines) else None

    @property
    def local_teacher(self) -> str | None:
        """The teacher's folder or Hub name if this run loads the teacher."""
        return None if self.remote_teacher else self.algo.distill.teacher

    def unused(self) -> Iterator[Unused]:
        """Yield the flags that have no effect with the current settings."""
        if self.rollout.only:
            yield from self._unused_without_training()
        if self.rollout.replay_dir:
            yield from self._unused_in_replay()
        if self.policy_loss_traits.rollout_ratio:
            flags = [f"algo.advantage.{name}" for name in CORRECTION_DETAILS]
            yield Unused(flags, f"with --actor.policy_loss_type {self.actor.policy_loss_type}")
        yield from self._unused_by_models()
        yield from self._unused_by_episodes()
        yield from super().unused()

    def _unused_without_training(self) -> Iterator[Unused]:
        sections = ["actor", "critic", "ref", "algo", "eval", "ckpt", "train"]
        generation = [
            "actor.model_name_or_path",
            "algo.advantage.estimator",
            "algo.dynamic_filtering_enable",
            "algo.dynamic_filtering_range",
            "train.seed",
            "train.num_episodes",
            "train.setup_timeout",
            "train.step_timeout",
            "train.full_determinism_enable",
            "train.agent_func_path",
        ]
        reward_models = ["train.dynamic_batch_enable", "train.max_tokens_per_gpu"]
        yield Unused(sections, "with --rollout.only", but=[*generation, *reward_models])

    def _unused_in_replay(self) -> Iterator[Unused]:
        names = [
            "vllm",
            "placement.vllm",
            "eval",
            "train.agent_func_path",
            "rollout.max_turns",
            "rollout.step_timeout",
            "rollout.episode_timeout",
            "rollout.dump_dir",
            "rollout.top_p",
            "rollout.top_k",
            "rollout.stop",
            "rollout.stop_token_ids",
            "rollout.seeded",
            "reward.remote_url",
            "reward.verifier",
            "reward.batch",
            "reward.timeout",
            "reward.retries",
            "reward.workers",
            "reward.memory_gib",
        ]
        yield Unused(names, "with --rollout.replay_dir")

    def _unused_by_models(self) -> Iterator[Unused]:
        critic = self.estimator_traits.needs_critic
        models = self.reward.models
        shared_by_critic = "train.colocate_critic_reward"
        yield from unused_without({CRITIC: critic}, "critic", "placement.critic", shared_by_critic)
        yield from unused_without(
            {FROZEN: self.has_frozen_policy}, "ref", "placement.ref", "train.colocate_actor_ref"
        )
        yield from unused_without({REWARD_MODEL: models}, "placement.reward", shared_by_critic)
        yield from unused_without({REWARD_MODEL: models, CRITIC: critic}, "reward.normalize_enable")
        yield from unused_without({CRITIC: critic, REWARD_MODEL: models}, "ds.value_head_prefix")

    def _unused_by_episodes(self) -> Iterator[Unused]:
        train = self.train
        agent = self.train.agent_func_path
        yield from unused_by_agents(agent)
        yield from unused_without({AGENT: agent}, "data.image_key")
        yield from unused_by_rewards(self.reward, self.rollout, agents={AGENT: agent}, judges={})
        askers = {
            AGENT: agent,
            FUNCTION: self.reward.function_path,
            "--algo.distill.teacher NAME": self.remote_teacher,
        }
        yield from unused_without(askers, "rollout.remote_engines")
        if self.hybrid:
            yield Unused(["vllm.max_engines"], "with --train.colocate_all")
        if not train.colocate_all:
            yield Unused(["vllm.enable_sleep"], "without --train.colocate_all")
        if train.async_enable:
            yield Unused(["rollout.vllm_generate_batch_size"], "with --train.async_enable")
        if train.dynamic_batch_enable:
            yield Unused(["rollout.micro_batch_size"], "with --train.dynamic_batch_enable")
        else:
            yield Unused(["rollout.max_tokens_per_gpu"], "without --train.dynamic_batch_enable")
