"""Sections of RL that say what is learnt: models, algorithm, training loop, data, evaluation."""

# ruff: noqa: RUF009  (defaults that are frozen dataclasses cannot be changed)
from __future__ import annotations

from dataclasses import dataclass

from openrlhf.config import choices
from openrlhf.config.flags import derived, option, required
from openrlhf.config.shared import (
    AdamConfig,
    DataConfig,
    EvalConfig,
    LMEngineConfig,
    LoraConfig,
    OptimizerConfig,
    TrainConfig,
)


@dataclass(frozen=True, kw_only=True)
class ActorConfig(OptimizerConfig):
    """The policy."""

    model_name_or_path: str = required(
        holds="model", help="Folder or hub name of the policy, the reference and the tokenizer."
    )
    num_nodes: int = option(1, ge=1, help="Nodes of the policy.")
    num_gpus_per_node: int = option(8, ge=1, help="GPUs (CPU processes) per node.")
    policy_loss_type: str = option("ppo", choices=choices.POLICY_LOSSES, help="Policy loss.")
    eps_clip: float = option(0.2, gt=0, help="Clip range of the ratio, both sides.")
    eps_clip_low_high: tuple[float, float] = derived(
        ge=0, help="Clip range below and above 1; unset: eps_clip twice."
    )
    dual_clip: float | None = option(
        None, gt=1, help="Bound of the loss where the advantage is negative."
    )
    entropy_coef: float | None = option(
        None, help="Weight of the entropy bonus; 0: only log it; unset: do not compute it."
    )
    aux_loss_coef: float = option(
        0.0, ge=0, help="Weight of the load-balancing loss of policy and critic."
    )
    gradient_checkpointing_enable: bool = option(
        False, help="Recompute activations in the backward pass, policy and critic."
    )
    gradient_checkpointing_reentrant: bool = option(
        False, help="Use the re-entrant implementation of it."
    )
    freeze_visual_encoder: bool = option(
        False, help="Train only the language part of a vision model."
    )
    adam: AdamConfig = AdamConfig(lr=1e-6)


@dataclass(frozen=True, kw_only=True)
class CriticConfig(OptimizerConfig):
    """The critic, with the estimator gae."""

    model_name_or_path: str | None = option(
        None,
        holds="model",
        help="Folder or hub name; unset: the first reward model, else the policy's.",
    )
    num_nodes: int = option(1, ge=1, help="Nodes of the critic.")
    num_gpus_per_node: int = option(8, ge=1, help="GPUs (CPU processes) per node.")
    value_clip: float = option(0.5, gt=0, help="Clip range of the values.")
    freezing_steps: int = option(-1, ge=-1, help="Steps that train the critic alone.")
    save_value_network: bool = option(False, help="Export the critic at the end.")
    adam: AdamConfig = AdamConfig(lr=9e-6)


@dataclass(frozen=True, kw_only=True)
class RefConfig:
    """The reference policy."""

    num_nodes: int = option(1, ge=1, help="Nodes of the reference.")
    num_gpus_per_node: int = option(8, ge=1, help="GPUs (CPU processes) per node.")
    offload: bool = option(False, help="Keep it in CPU memory between uses.")


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    """Advantage estimation."""

    estimator: str = option("gae", choices=choices.ESTIMATORS, help="Estimator.")
    gamma: float = option(1.0, ge=0, le=1, help="Discount per token.")
    lambd: float = option(1.0, ge=0, le=1, help="Lambda of GAE.")
    no_std_norm: bool = option(
        False, help="Centre the advantages of a batch without dividing by their deviation."
    )
    is_correction_enable: bool = option(
        False, help="Weigh the loss for the difference between engine and trainer."
    )
    is_correction_type: str = option("tis", choices=choices.CORRECTIONS, help="Which weight.")
    is_correction_threshold: tuple[float, float] = option(
        (0.5, 5.0), ge=0, help="Lower and upper bound of it."
    )


@dataclass(frozen=True, kw_only=True)
class CorrectionConfig:
    """Correction of the difference between engine and trainer, by its three axes."""

    level: str | None = option(
        None, choices=("token", "sequence", "geometric"), help="What a ratio is taken over."
    )
    mode: str | None = option(
        None, choices=("clip", "mask", "truncate"), help="What happens outside the band."
    )
    band: tuple[float, float] | None = option(None, ge=0, help="Lower and upper bound.")


@dataclass(frozen=True, kw_only=True)
class KLConfig:
    """Distance to the reference."""

    init_coef: float = option(0.01, ge=0, help="Coefficient; 0: no reference is loaded.")
    estimator: str = option("k1", choices=choices.KL_ESTIMATORS, help="Estimator.")
    use_loss: bool = option(False, help="Put it into the loss instead of the rewards.")
    target: float | None = option(
        None, gt=0, help="Adapt the coefficient towards this KL, nats per token."
    )
    horizon: int = option(10000, ge=1, help="Samples over which it adapts.")
    stop_update: float | None = option(
        None, gt=0, help="End the updates of a batch at this KL, nats per token."
    )
    stop_run: float | None = option(None, gt=0, help="End the run at this KL, nats per token.")


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The policy loss of a window."""

    aggregation: str = option(
        "token",
        choices=("token", "sequence", "constant"),
        help="Mean over tokens, mean of sequence means, or sum over a constant length; "
        "sequence where the policy loss is gspo.",
    )


@dataclass(frozen=True, kw_only=True)
class DistillConfig:
    """On-policy distillation."""

    teacher: str | None = option(None, holds="model", help="Folder or hub name of the teacher.")
    coef: float = option(1.0, ge=0, help="Weight of the teacher.")


@dataclass(frozen=True, kw_only=True)
class PtxConfig:
    """Pretraining text mixed into the updates."""

    dataset: str | None = option(
        None, holds="dataset", help="Data: files, folders or hub names, by comma."
    )
    probs: str | None = option(None, help="Share of each dataset, by comma.")
    split: str = option("train", help="Split of each dataset.")
    coef: float = option(0.05, ge=0, help="Weight of its loss.")


@dataclass(frozen=True, kw_only=True)
class AlgoConfig:
    """The algorithm."""

    advantage: AdvantageConfig = AdvantageConfig()
    kl: KLConfig = KLConfig()
    loss: LossConfig = LossConfig()
    correction: CorrectionConfig = CorrectionConfig()
    distill: DistillConfig = DistillConfig()
    ptx: PtxConfig = PtxConfig()
    dynamic_filtering_enable: bool = option(
        False, help="Replace prompts whose mean score is outside the range."
    )
    dynamic_filtering_range: tuple[float, float] = option(
        (0.0, 1.0), help="The range, both ends excluded."
    )


@dataclass(frozen=True, kw_only=True)
class RLTrainConfig(TrainConfig):
    """Batches, epochs, seed, placement, pipeline."""

    num_episodes: int = option(1, ge=1, help="Passes over the prompts.")
    dynamic_batch_enable: bool = option(False, help="Micro-batches by tokens; implies packing.")
    max_tokens_per_gpu: int = option(16192, ge=1, help="Tokens of such a micro-batch.")
    colocate_actor_ref: bool = option(False, help="Policy and reference share devices.")
    colocate_critic_reward: bool = option(False, help="Critic and reward models share devices.")
    colocate_all: bool = option(False, help="All models and the engines share devices.")
    async_enable: bool = option(False, help="Generate and train at the same time.")
    async_queue_size: int = option(1, ge=1, help="Batches in generation or waiting at most.")
    max_staleness: int = derived(
        ge=1, help="Versions a sample may be behind; unset: train.async_queue_size."
    )
    partial_rollout_enable: bool = option(
        False, help="Publish weights in the middle of episodes, with train.async_enable."
    )
    agent_func_path: str | None = option(None, help="A .py file with class AgentExecutor.")
    enable_ema: bool = option(False, help="Average the policy's weights; the average is exported.")
    ema_beta: float = option(0.992, ge=0, lt=1, help="Decay of the average.")
    max_restarts: int = option(0, ge=0, help="Restarts of the run after a worker's death.")
    setup_timeout: float = option(600.0, gt=0, help="Seconds for devices and models to be there.")
    step_timeout: float = option(3600.0, gt=0, help="Seconds for one training step.")
    publish_timeout: float = option(600.0, gt=0, help="Seconds to bring weights to the engines.")


@dataclass(frozen=True, kw_only=True)
class RLLoraConfig(LoraConfig):
    """LoRA adapters."""

    publish: str = option(
        "merged", choices=("merged", "adapter"), help="What is sent to the engines."
    )


@dataclass(frozen=True, kw_only=True)
class RLEngineConfig(LMEngineConfig):
    """DeepSpeed: precision, memory, parallelism."""

    enable_sleep: bool = option(False, help="Move the engines' state to CPU memory between uses.")
    value_head_prefix: str = option("score", help="Name of the scalar head; a stored one wins.")
    lora: RLLoraConfig = RLLoraConfig()


@dataclass(frozen=True, kw_only=True)
class RLDataConfig(DataConfig):
    """Tokenizer and prompts."""

    prompt_dataset: str = required(
        holds="dataset", help="Prompts: files, folders or hub names, by comma."
    )
    prompt_probs: str | None = option(
        None, help="Share of each dataset, by comma; unset: one after the other."
    )
    prompt_split: str = option("train", help="Split of each dataset.")
    input_key: str = option("input", help="Column with the prompt, text or chat.")
    label_key: str | None = option(None, help="Column handed to the reward function as label.")
    image_key: str = option("images", help="Column with images.")
    max_images_per_prompt: int = option(0, ge=0, help="Images of a prompt; 0: text only.")


@dataclass(frozen=True, kw_only=True)
class RLEvalConfig(EvalConfig):
    """Evaluation during training."""

    temperature: float = option(0.6, ge=0, help="Temperature; 0: greedy.")
    n_samples_per_prompt: int = option(4, ge=1, help="Responses per prompt: the k of pass@k.")
    at_start: bool = option(False, help="Evaluate before the first step too.")
