"""Sections that several commands share; `config.ds.zpg` is the flag --ds.zpg."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from openrlhf.config import choices
from openrlhf.config.flags import FOR_OLDER_SCRIPTS, Section, Unused, derived, option, required

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
# Those with a floor, --min_lr_ratio.
FLOORED_SCHEDULERS = (
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
)


class CheckpointConfig(Section):
    """Checkpoints and the exported model."""

    output_dir: str = option(
        "./ckpt", "Folder of the final model and tokenizer.", holds="place", writes="model"
    )
    path: str = option(
        "./ckpt/checkpoints",
        "Folder of the checkpoints of the run.",
        holds="place",
        writes="checkpoints",
    )
    save_steps: int = option(-1, "Steps between checkpoints; -1: none.", ge=-1)
    save_hf: bool = option(False, "Export a Transformers model with every checkpoint.")
    export_fp32: bool = option(
        False, "Export float32 weights (with bf16: those of the optimizer), for further training."
    )
    disable_ds: bool = option(False, "Write no engine state: the run cannot be resumed.")
    max_num: int = option(3, "Regular checkpoints to keep.", ge=1)
    max_mem: float = option(1e8, "Maximum size of all checkpoints together, GiB.", gt=0)
    load_enable: bool = option(False, "Continue from the newest complete checkpoint.")
    best_metric_key: str = option(
        "",
        "Evaluation metric of the best checkpoint. Lower is better if its name ends in loss, "
        "truncated_rate or failed_episodes. none: keep no best checkpoint; empty: the first "
        "*_pass1 in RL, else the first *loss and only with --eval.patience.",
    )

    @property
    def saves(self) -> bool:
        """True if checkpoints are written at regular steps."""
        return self.save_steps > 0

    @property
    def resumable(self) -> bool:
        """True if a later run can go on from the checkpoints."""
        return self.saves and not self.disable_ds

    @property
    def has_earlier(self) -> bool:
        """True if an earlier run has left checkpoints in the folder."""
        return any(Path(self.path).glob("*.manifest.json"))


class WandbConfig(Section):
    """Weights & Biases."""

    key: str | None = option(
        None,
        "API key, never saved. Any text if you are already logged in.",
        saved=False,
        secret=True,
    )
    org: str | None = option(None, "Entity: user or team.")
    group: str | None = option(None, "Group of runs.")
    project: str = option("openrlhf", "Project.")
    run_name: str | None = option(
        None,
        "Name of the run, also in TensorBoard; unset: the last part of run.dir.",
    )

    def unused(self) -> Iterator[Unused]:
        """Yield the flags without an effect under these values."""
        if not self.key:
            yield Unused(["org", "group", "project"], "without --key")


class LoggerConfig(Section):
    """Trackers, and the interval of entries."""

    logging_steps: int = option(1, "Steps between two entries.", ge=1)
    wandb: WandbConfig = WandbConfig()
    tensorboard_dir: str | None = option(
        None, "Folder for TensorBoard's event files.", holds="place", writes="events"
    )

    def unused(self) -> Iterator[Unused]:
        """Yield the flags without an effect under these values."""
        if not (self.wandb.key or self.tensorboard_dir):
            yield Unused(["wandb.run_name"], "without --wandb.key or --tensorboard_dir")


class RunConfig(Section):
    """The run folder and the terminal."""

    dir: str = derived(
        "Run folder; unset: ./runs/<command>-<time>-<process>.", holds="place", writes="run"
    )
    quiet: bool = option(False, "Plain lines on the terminal.")
    json: bool = option(False, "One JSON object per step on the terminal.")


class SeedConfig(Section):
    """Seed."""

    seed: int = option(42, "Seed of order, initialisation and sampling.")
    full_determinism_enable: bool = option(False, "Deterministic kernels; slower.")


class ProcessConfig(SeedConfig):
    """Seed, agents, timeouts."""

    agent_func_path: str | None = option(
        None, "A .py file with class AgentExecutor.", holds="place"
    )
    setup_timeout: float = option(600.0, "Seconds until devices and models are ready.", gt=0)
    step_timeout: float = option(
        3600.0, "Seconds for one step (evaluation: for rollout.batch_size prompts).", gt=0
    )


class TrainConfig(SeedConfig):
    """Batches, epochs, seed."""

    batch_size: int = option(128, "Samples (RM, DPO: pairs) per optimizer step, all ranks.", ge=1)
    micro_batch_size: int = option(8, "Samples per forward pass and rank.", ge=1)
    max_epochs: int = option(1, "Epochs over the data (RL: over each rollout batch).", ge=1)
    max_nonfinite: int = option(3, "Steps in a row with a non-finite loss that end the run.", ge=1)
    enable_ema: bool = option(
        False, "Average the weights over the steps (RL: of the policy) and export the average."
    )
    ema_beta: float = option(0.992, "Decay of the average.", ge=0, lt=1)

    def unused(self) -> Iterator[Unused]:
        """Yield the flags without an effect under these values."""
        if not self.enable_ema:
            yield Unused(["ema_beta"], "without --enable_ema")


class EvalConfig(Section):
    """Evaluation during training."""

    steps: int = option(
        -1,
        "Steps between two evaluations; -1: at each epoch's end (RL: never).",
        ge=-1,
    )
    dataset: str | None = option(
        None, "Comma-separated files, folders or Hub names.", holds="dataset"
    )
    split: str = option("train", "Split of the dataset; files have a single split.")
    patience: int | None = option(
        None,
        "Stop after N evaluations without improvement of --ckpt.best_metric_key, and export the "
        "best weights.",
        ge=1,
    )

    def unused(self) -> Iterator[Unused]:
        """Yield the flags without an effect under these values."""
        if not self.dataset:
            yield Unused(["split"], "without --dataset")


class LoraConfig(Section):
    """LoRA adapters."""

    rank: int = option(0, "Rank; 0: train all weights, without an adapter.", ge=0)
    alpha: int = option(16, "Scale: the update is multiplied by alpha / rank.", gt=0)
    dropout: float = option(0.0, "Dropout in front of the adapter.", ge=0, lt=1)
    target_modules: tuple[str, ...] = option(
        ("all-linear",), "Modules to adapt; all-linear: every linear layer."
    )
    rslora: bool = option(False, "Multiply by alpha / sqrt(rank) instead (rsLoRA).")
    dora: bool = option(False, "Also train the norm of each weight row (DoRA).")

    def unused(self) -> Iterator[Unused]:
        """Yield the flags without an effect under these values."""
        if not self.rank:
            scale = ["alpha", "rslora", "dora"]
            yield Unused([*scale, "dropout", "target_modules"], "without --rank")


class LoadingConfig(Section):
    """Loading of models, and their data type and attention."""

    param_dtype: str = option("bf16", "Data type of the weights.", choices=DTYPES)
    attn_implementation: str = option(
        "flash_attention_2", "Attention. The default is FlashAttention 2 if it can run, else sdpa."
    )
    experts_implementation: str | None = option(
        None, "Kernel of mixture-of-experts layers; unset: Transformers' own.", choices=EXPERTS
    )
    packing_samples: bool = option(False, "Concatenate samples instead of padding them.")
    load_in_4bit: bool = option(
        False,
        "QLoRA: store the frozen weights in 4 bits (NF4), also of a teacher and a separate "
        "reference, but not of reward models in RL.",
    )


class DeepSpeedConfig(LoadingConfig):
    """DeepSpeed: precision, memory, parallelism."""

    zero_stage: int = option(2, "ZeRO stage.", ge=0, le=3)
    zpg: int = option(1, "Ranks of a secondary partition (ZeRO++ hpZ, stage 3).", ge=1)
    adam_offload: bool = option(False, "Keep the optimizer state in CPU memory and step there.")
    param_offload: str = option(
        "none", "Where ZeRO 3 stores parameters between uses.", choices=("none", "cpu", "nvme")
    )
    nvme_path: str | None = option(None, "Folder on NVMe for offloaded state.", holds="place")
    use_universal_ckpt: bool = option(
        False,
        "Continue with another number of processes, or ZeRO 1 after 2 or 2 after 1.",
    )
    grad_accum_dtype: str | None = option(
        None, "Data type in which gradients are summed; unset: fp32.", choices=DTYPES
    )
    overlap_comm: bool = option(False, "Reduce gradients while the backward pass runs.")
    deepcompile: bool = option(False, "DeepSpeed's DeepCompile.")
    torch_compile: bool = option(False, "Compile the model with torch.compile.")
    tensor_parallel_size: int = option(1, "Ranks that share each layer.", ge=1)
    ring_attn_size: int = option(1, "Ranks that share each sequence.", ge=1)
    ring_attn_head_stride: int = option(1, "Heads per ring step; more: faster, more memory.", ge=1)
    lora: LoraConfig = LoraConfig()

    @property
    def sleeps(self) -> bool:
        """True if the training state waits in CPU memory between updates."""
        return False

    def data_slices(self, ranks: int) -> int:
        """Return into how many parts these ranks divide a batch, at least 1.

        Ranks that share sequences or layers have the same part.
        """
        ranks_per_slice = self.ring_attn_size * self.tensor_parallel_size
        return max(1, ranks // max(1, ranks_per_slice))

    def unused(self) -> Iterator[Unused]:
        """Yield the flags without an effect under these values."""
        if self.zero_stage not in (2, 3):
            yield Unused(["overlap_comm"], "without --zero_stage 2 or 3")
        if self.ring_attn_size == 1:
            yield Unused(["ring_attn_head_stride"], "with --ring_attn_size 1")


class LMDeepSpeedConfig(DeepSpeedConfig):  # of commands that train a language model
    use_liger_kernel: bool = option(False, "Load the model with Liger's fused kernels.")


class TokenizerConfig(Section):
    """Tokenizer."""

    disable_fast_tokenizer: bool = option(
        False, "No effect: each tokenizer has one implementation."
    )
    max_len: int = option(2048, "Tokens of a sample (RL: of prompt and response).", ge=1)

    def unused(self) -> Iterator[Unused]:
        """Yield the flags without an effect under these values."""
        yield Unused(["disable_fast_tokenizer"], FOR_OLDER_SCRIPTS)


class FormatConfig(TokenizerConfig):
    """Tokenizer and format of prompts."""

    input_template: str | None = option(None, "Text with {} as prompt, without a chat template.")
    apply_chat_template: bool = option(False, "Render with the tokenizer's chat template.")

    def unused(self) -> Iterator[Unused]:
        """Yield the flags without an effect under these values."""
        yield from super().unused()
        if self.apply_chat_template:
            yield Unused(["input_template"], "with --apply_chat_template")


class DataConfig(FormatConfig):
    """Tokenizer and data."""

    dataloader_num_workers: int = option(0, "Worker processes that prepare batches.", ge=0)
    max_samples: int = option(1_000_000, "Maximum rows, of each dataset and of their blend.", ge=1)
    layout: str = option(
        "auto",
        "Layout of the rows. auto: detected from the columns, unless *_key flags are given; "
        "columns: use the column flags.",
        choices=choices.LAYOUTS,
    )


class DatasetConfig(DataConfig):
    dataset: str = required("Data: comma-separated files, folders or Hub names.", holds="dataset")
    dataset_probs: str | None = option(
        None, "Comma-separated probabilities; unset: use the datasets in order."
    )
    dataset_split: str = option("train", "Split of each dataset; files have a single split.")


class EndedTextConfig(Section):
    space_before_eos: bool = option(True, "Add a space before an appended end-of-text token.")


class OfflineDataConfig(EndedTextConfig, DatasetConfig):
    tokenizer_chat_template: str | None = option(
        None,
        "A chat template, or a file with one, instead of the tokenizer's.",
        holds="place",
    )

    def unused(self) -> Iterator[Unused]:
        """Yield the flags without an effect under these values."""
        yield from super().unused()
        if not (self.apply_chat_template or self.layout in ("auto", "arena")):
            yield Unused(
                ["tokenizer_chat_template"],
                "without --apply_chat_template or --layout auto or arena",
            )


class AdamConfig(Section):
    """AdamW."""

    lr: float = option(5e-6, "Peak learning rate.", ge=0)
    betas: tuple[float, float] = option((0.9, 0.95), "Decay of both moments.", ge=0, lt=1)
    eps: float = option(1e-8, "Term added to the denominator.", gt=0)
    weight_decay: float = option(0.0, "Decoupled decay; biases and norms are exempt.", ge=0)


class MuonConfig(Section):
    """Muon, for the matrices; AdamW trains the other parameters."""

    lr: float = option(0.02, "Peak learning rate of the matrices.", ge=0)
    momentum: float = option(0.95, "Momentum.", ge=0, lt=1)
    ns_steps: int = option(5, "Newton-Schulz steps; DeepSpeed always takes 5.", ge=1)
    nesterov: bool = option(True, "Nesterov momentum; DeepSpeed always uses it.")


class OptimizerConfig(Section):
    """Optimizer and learning-rate schedule of one model."""

    optim: str = option("adam", "Optimizer.", choices=("adam", "muon"))
    muon: MuonConfig = MuonConfig()
    adam: AdamConfig = AdamConfig()
    lr_scheduler: str = option("cosine_with_min_lr", "Schedule.", choices=SCHEDULERS)
    lr_warmup_ratio: float = option(0.03, "Fraction of the steps that warm up.", ge=0, le=1)
    min_lr_ratio: float = option(
        0.1,
        "Lowest rate, as a fraction of the peak, of schedules that have one.",
        ge=0,
        le=1,
    )
    max_norm: float = option(1.0, "Clip the gradient to this norm; 0: no clipping.", ge=0)

    def unused(self) -> Iterator[Unused]:
        """Yield the flags without an effect under these values."""
        yield from super().unused()
        if self.optim != "muon":
            yield Unused(["muon"], "without --optim muon")
        if self.lr_scheduler == "constant":
            yield Unused(["lr_warmup_ratio"], "with --lr_scheduler constant")
        if self.lr_scheduler not in FLOORED_SCHEDULERS:
            schedulers = " or ".join(FLOORED_SCHEDULERS)
            yield Unused(["min_lr_ratio"], f"without --lr_scheduler {schedulers}")


class GroupConfig(Section):
    """The devices of a role."""

    num_nodes: int = option(1, "Nodes of this role.", ge=1)
    num_gpus_per_node: int = option(8, "GPUs (CPU processes) per node.", ge=1)


class ModelSourceConfig(Section):
    """Source of models."""

    trust_remote_code: bool = option(False, "Run Python code that comes with a model.")


class TrainedModelConfig(Section):
    """The model to train."""

    model_name_or_path: str = required("Folder or Hub name, with its tokenizer.", holds="model")
    gradient_checkpointing_enable: bool = option(
        False, "Recompute activations to save memory (RL: critic too)."
    )
    gradient_checkpointing_reentrant: bool = option(
        False,
        "Use the re-entrant implementation of gradient checkpointing.",
    )
    aux_loss_coef: float = option(
        0.0, "Weight of the load-balancing loss of experts (RL: critic too).", ge=0
    )

    def unused(self) -> Iterator[Unused]:
        """Yield the flags without an effect under these values."""
        yield from super().unused()
        if not self.gradient_checkpointing_enable:
            yield Unused(
                ["gradient_checkpointing_reentrant"], "without --gradient_checkpointing_enable"
            )


class ModelConfig(ModelSourceConfig, TrainedModelConfig):
    """The model to train."""
