"""Sections that several commands share; a field's path is its flag: `config.ds.zero_stage`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from openrlhf.config.flags import derived, option, required

DTYPES = ("bf16", "fp16", "fp32")
EXPERTS = ("eager", "batched_mm", "grouped_mm", "deepgemm")
SCHEDULERS = (
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints and the exported model."""

    output_dir: str = option("./ckpt", help="Folder of the final model and tokenizer.")
    path: str = option("./ckpt/checkpoints", help="Folder of the checkpoints of the run.")
    save_steps: int = option(-1, ge=-1, help="Steps between checkpoints; -1: none.")
    save_hf: bool = option(False, help="Export a Transformers model with every checkpoint.")
    disable_ds: bool = option(False, help="Write no engine state: the run cannot be resumed.")
    max_num: int = option(3, ge=1, help="Regular checkpoints to keep.")
    max_mem: float = option(1e8, gt=0, help="GiB all checkpoints together may take.")
    load_enable: bool = option(False, help="Continue from the newest complete checkpoint.")
    best_metric_key: str = option(
        "",
        help="Evaluation metric of the best checkpoint; none: keep no best one; empty: the first "
        "of the evaluation (RL: the first *_pass1).",
    )


@dataclass(frozen=True, kw_only=True)
class WandbConfig:
    """Weights & Biases."""

    key: str | None = option(
        None, saved=False, help="API key; any text when this machine is logged in. Never saved."
    )
    org: str | None = option(None, help="Entity: user or team.")
    group: str | None = option(None, help="Group of runs.")
    project: str = option("openrlhf", help="Project.")
    run_name: str = derived(
        help="Name of the run, and of its folder under TensorBoard's; unset: stage and time."
    )


@dataclass(frozen=True, kw_only=True)
class LoggerConfig:
    """Where numbers go besides the run folder."""

    logging_steps: int = option(1, ge=1, help="Steps between two entries.")
    wandb: WandbConfig = WandbConfig()
    tensorboard_dir: str | None = option(None, help="Folder for TensorBoard's event files.")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The run folder and the terminal."""

    dir: str = derived(help="Run folder; unset: ./runs/<command>-<time>.")
    quiet: bool = option(False, help="Plain lines on the terminal.")
    json: bool = option(False, help="One JSON object per step on the terminal.")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Batches, epochs, seed."""

    batch_size: int = option(
        128, ge=1, help="Samples (pairs for RM and DPO) per optimizer step, all ranks together."
    )
    micro_batch_size: int = option(8, ge=1, help="Samples per forward pass and rank.")
    max_epochs: int = option(1, ge=1, help="Passes over the data (RL: over each rollout batch).")
    seed: int = option(42, help="Seed of order, initialisation and sampling.")
    full_determinism_enable: bool = option(False, help="Deterministic kernels; slower.")
    max_nonfinite: int = option(
        3, ge=1, help="Stop after so many steps in a row without a finite loss or gradient."
    )


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation during training."""

    steps: int = option(
        -1, ge=-1, help="Steps between evaluations; -1: at each epoch's end (RL: never)."
    )
    dataset: str | None = option(
        None, holds="dataset", help="Evaluation data: files, folders or hub names, by comma."
    )
    split: str = option("train", help="Split of it.")
    patience: int | None = option(
        None, ge=1, help="Stop after so many evaluations without a better ckpt.best_metric_key."
    )


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """LoRA adapters."""

    rank: int = option(0, ge=0, help="Rank; 0: no adapter, every weight is trained.")
    alpha: int = option(16, gt=0, help="Scale: the update is multiplied by alpha / rank.")
    dropout: float = option(0.0, ge=0, lt=1, help="Dropout in front of the adapter.")
    target_modules: tuple[str, ...] = option(
        ("all-linear",), help="Names of the modules to adapt; all-linear: every linear layer."
    )


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """DeepSpeed: precision, memory, parallelism."""

    zero_stage: int = option(2, ge=0, le=3, help="ZeRO stage.")
    param_dtype: str = option("bf16", choices=DTYPES, help="Data type of the weights.")
    zpg: int = option(1, ge=1, help="Ranks of a secondary partition (ZeRO++ hpZ, stage 3).")
    adam_offload: bool = option(False, help="Keep the optimizer's state in CPU memory.")
    param_offload: str = option(
        "none", choices=("none", "cpu", "nvme"), help="Where parameters wait (ZeRO 3)."
    )
    nvme_path: str | None = option(None, help="Folder on NVMe for offloaded state.")
    attn_implementation: str = option(
        "flash_attention_2",
        help="Attention of Transformers; the default means FlashAttention 2 where CUDA and the "
        "package are there, and sdpa elsewhere.",
    )
    experts_implementation: str | None = option(
        None, choices=EXPERTS, help="Kernel of mixture-of-experts layers; unset: Transformers' own."
    )
    use_universal_ckpt: bool = option(False, help="Load a checkpoint in universal format.")
    grad_accum_dtype: str | None = option(
        None, choices=DTYPES, help="Data type gradients are summed in; unset: fp32."
    )
    overlap_comm: bool = option(False, help="Reduce gradients while the backward pass runs.")
    deepcompile: bool = option(False, help="DeepSpeed's DeepCompile.")
    torch_compile: bool = option(False, help="Compile the model with torch.compile.")
    tensor_parallel_size: int = option(1, ge=1, help="Ranks that share each layer.")
    packing_samples: bool = option(False, help="Concatenate samples instead of padding them.")
    ring_attn_size: int = option(1, ge=1, help="Ranks that share each sequence.")
    ring_attn_head_stride: int = option(
        1, ge=1, help="Heads per ring step; more is faster and takes more memory."
    )
    load_in_4bit: bool = option(False, help="QLoRA: hold the frozen weights in 4 bits (NF4).")
    lora: LoraConfig = LoraConfig()


@dataclass(frozen=True, kw_only=True)
class LMEngineConfig(EngineConfig):
    """DeepSpeed: precision, memory, parallelism. For commands that train a language model."""

    use_liger_kernel: bool = option(False, help="Load the model with Liger's fused kernels.")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Tokenizer and data."""

    disable_fast_tokenizer: bool = option(False, help="Use the tokenizer written in Python.")
    dataloader_num_workers: int = option(0, ge=0, help="Processes that prepare batches.")
    max_len: int = option(2048, ge=1, help="Tokens of a sample (RL: of prompt and response).")
    max_samples: int = option(1_000_000, ge=1, help="Rows to use, per dataset and of their blend.")
    input_template: str | None = option(
        None, help="Text with {} for the prompt, used where no chat template is."
    )
    apply_chat_template: bool = option(False, help="Render with the tokenizer's chat template.")


@dataclass(frozen=True, kw_only=True)
class OfflineDataConfig(DataConfig):
    """Tokenizer and data."""

    dataset: str = required(
        holds="dataset", help="Training data: files, folders or hub names, by comma."
    )
    dataset_probs: str | None = option(
        None, help="Share of each dataset, by comma; unset: one after the other."
    )
    dataset_split: str = option("train", help="Split of each dataset.")
    tokenizer_chat_template: str | None = option(
        None, help="Chat template instead of the tokenizer's own."
    )


@dataclass(frozen=True, kw_only=True)
class AdamConfig:
    """AdamW."""

    lr: float = option(5e-6, ge=0, help="Peak learning rate.")
    betas: tuple[float, float] = option((0.9, 0.95), ge=0, lt=1, help="Decay of both moments.")
    eps: float = option(1e-8, gt=0, help="Term that keeps the division finite.")
    weight_decay: float = option(
        0.0, ge=0, help="Decoupled weight decay; biases and norms are exempt."
    )


@dataclass(frozen=True, kw_only=True)
class MuonConfig:
    """Muon, for the matrices; AdamW has the rest."""

    lr: float = option(0.02, ge=0, help="Peak learning rate of the matrices.")
    momentum: float = option(0.95, ge=0, lt=1, help="Momentum.")
    ns_steps: int = option(5, ge=1, help="Newton-Schulz steps; the engine always takes 5.")
    nesterov: bool = option(True, help="Nesterov momentum; the engine always uses it.")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer and learning-rate schedule of one model."""

    optim: str = option("adam", choices=("adam", "muon"), help="Optimizer.")
    muon: MuonConfig = MuonConfig()
    adam: AdamConfig = AdamConfig()
    lr_scheduler: str = option("cosine_with_min_lr", choices=SCHEDULERS, help="Schedule.")
    lr_warmup_ratio: float = option(0.03, ge=0, le=1, help="Share of the steps that warm up.")
    min_lr_ratio: float = option(
        0.1, ge=0, le=1, help="Floor as a share of the peak, for schedules with a minimum."
    )
    max_norm: float = option(1.0, ge=0, help="Clip the gradient to this norm; 0: no clipping.")


@dataclass(frozen=True, kw_only=True)
class ModelSourceConfig:
    """Where models come from."""

    trust_remote_code: bool = option(False, help="Run Python code that comes with a model.")


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ModelSourceConfig):
    """The model to train."""

    model_name_or_path: str = required(
        holds="model", help="Folder or hub name of the model and its tokenizer."
    )
    gradient_checkpointing_enable: bool = option(
        False, help="Recompute activations in the backward pass to save memory."
    )
    gradient_checkpointing_reentrant: bool = option(
        False, help="Use the re-entrant implementation of it."
    )
    aux_loss_coef: float = option(
        0.0, ge=0, help="Weight of the load-balancing loss of a mixture of experts."
    )


@dataclass(frozen=True, kw_only=True)
class RootConfig:
    """What every training command has."""

    run_name_prefix: ClassVar[str] = ""

    model: ModelSourceConfig = ModelSourceConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    ds: EngineConfig = EngineConfig()
    ckpt: CheckpointConfig = CheckpointConfig()
    logger: LoggerConfig = LoggerConfig()
    run: RunConfig = RunConfig()
    plugin: tuple[str, ...] = option(
        (),
        metavar="FILE.py",
        help="Your file that registers estimators, losses and so on; repeatable.",
    )
    dry_run: bool = option(
        False, saved=False, help="Check everything, show plan and first batch, and stop."
    )
    use_ms: bool = option(False, help="Download from ModelScope instead of the Hugging Face hub.")
    local_rank: int = option(-1, saved=False, help="Set by launchers; wins over LOCAL_RANK.")
