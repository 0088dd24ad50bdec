"""Sections that several commands share; `config.ds.zpg` is the flag --ds.zpg."""

from __future__ import annotations

from collections.abc import Iterator

from openrlhf.config import choices
from openrlhf.config.flags import Section, Unused, count, option, required, switch, unset

DTYPES = ("bf16", "fp16", "fp32")
EXPERTS = ("eager", "batched_mm", "grouped_mm", "deepgemm")
# The number of sequences in a packed row changes with nearly every micro-batch.
COMPILES_TOO_OFTEN = "leave it out, because it would compile nearly every micro-batch again"


class CheckpointConfig(Section):
    """Checkpoints and the exported model."""

    output_dir: str = option(
        "./ckpt", "Output folder for the final model and tokenizer.", holds="place", writes="model"
    )
    path: str = option(
        "./ckpt/checkpoints",
        "Folder for the run's checkpoints.",
        holds="place",
        writes="checkpoints",
    )
    save_steps: int = option(-1, "Steps between checkpoints; -1: none.", ge=-1)
    save_hf: bool = switch("Export a Transformers model with every checkpoint.")
    export_fp32: bool = switch(
        "Export float32 weights for further training (with bf16: the optimizer's master weights).",
    )
    disable_ds: bool = switch("Do not save the training state; the run cannot be resumed.")
    max_num: int = option(3, "Number of regular checkpoints to keep.", ge=0)
    max_mem: float = option(1e8, "Maximum total size of all checkpoints, in GiB.", gt=0)
    load_enable: bool = switch("Resume from the newest complete checkpoint.")
    best_metric_key: str = option(
        "",
        "Metric of the best checkpoint; lower is better for *loss, *truncated_rate and "
        "*failed_episodes. none: keep none; empty: the first *_pass1 in RL, otherwise the first "
        "*loss, with --eval.patience.",
    )

    @property
    def saves(self) -> bool:
        """True if checkpoints are written at regular steps."""
        return self.save_steps > 0

    @property
    def resumable(self) -> bool:
        """True if a later run can resume from the checkpoints."""
        return self.saves and not self.disable_ds

    @property
    def has_files(self) -> bool:
        """True if a checkpoint contains files: the state of the run, the exported model or both."""
        return self.save_hf or not self.disable_ds


class WandbConfig(Section):
    """Weights & Biases."""

    key: str | None = unset(
        "API key, which is never saved. If you are already logged in, pass any text.",
        saved=False,
        secret=True,
    )
    org: str | None = unset("Entity: user or team.", needs="key")
    group: str | None = unset("Group of runs.", needs="key")
    project: str = option("openrlhf", "Project.", needs="key")
    run_name: str | None = unset(
        "Name of the run, also in TensorBoard; unset: the last part of run.dir.",
    )


class LoggerConfig(Section):
    """Experiment trackers and the logging interval."""

    logging_steps: int = count(1, "Log every N-th step, and every step with a notice.")
    wandb: WandbConfig = WandbConfig()
    tensorboard_dir: str | None = unset(
        "Folder for TensorBoard's event files.", holds="place", writes="events"
    )

    def unused(self) -> Iterator[Unused]:
        """Yield the flags that have no effect with the current settings."""
        if not (self.wandb.key or self.tensorboard_dir):
            yield Unused(["wandb.run_name"], "without --wandb.key or --tensorboard_dir")


def logger_of(project: str) -> LoggerConfig:
    """Return the logger section of a command with this default project."""
    return LoggerConfig(wandb=WandbConfig(project=project))


class RunConfig(Section):
    """Run folder and terminal output."""

    dir: str = unset(
        "Run folder; unset: ./runs/<command>-<time>-<process>.", holds="place", writes="run"
    )
    quiet: bool = switch("Print plain lines to the terminal.")
    json: bool = switch("Print one JSON object per step to the terminal.")


class SeedConfig(Section):
    """Seed."""

    seed: int = option(42, "Random seed for data order, initialization and sampling.")
    full_determinism_enable: bool = switch("Use deterministic kernels, which are slower.")


class ProcessConfig(SeedConfig):
    """Seed, agents, timeouts."""

    agent_func_path: str | None = unset(
        "A .py file that defines a class AgentExecutor.", holds="place"
    )
    setup_timeout: float = option(
        600.0, "Time limit in seconds for devices and models to become ready.", gt=0
    )
    step_timeout: float = option(
        3600.0,
        "Time limit in seconds for each wait, such as for the next finished prompt or an update.",
        gt=0,
    )


class TrainConfig(SeedConfig):
    """Batches, epochs, seed."""

    batch_size: int = count(128, "Samples (RM, DPO: pairs) per optimizer step, over all ranks.")
    micro_batch_size: int = count(8, "Samples per forward pass on each rank.")
    max_epochs: int = count(1, "Number of epochs over the data (RL: over each rollout batch).")
    max_nonfinite: int = count(
        3, "Stop the run after this many consecutive steps with a non-finite loss."
    )
    enable_ema: bool = switch(
        "Keep an exponential moving average (EMA) of the weights (RL: of the policy) and "
        "export it. Evaluations use the weights themselves.",
    )
    ema_beta: float = option(0.992, "Decay of the EMA.", ge=0, lt=1, needs="enable_ema")


class EvalConfig(Section):
    """Evaluation during training."""

    steps: int = option(
        -1,
        "Steps between two evaluations; -1: at the end of each epoch (RL: never).",
        ge=-1,
    )
    dataset: str | None = unset("Comma-separated files, folders or Hub names.", holds="dataset")
    split: str = option(
        "train", "Split of the dataset; files have a single split.", needs="dataset"
    )
    patience: int | None = unset(
        "Stop after N evaluations without improvement of --ckpt.best_metric_key, and export the "
        "best weights.",
        ge=1,
    )


class LoraConfig(Section):
    """LoRA adapters."""

    rank: int = option(0, "LoRA rank; 0: train all weights, without an adapter.", ge=0)
    alpha: int = option(
        16, "LoRA alpha: the update is multiplied by alpha / rank.", gt=0, needs="rank"
    )
    dropout: float = option(0.0, "Dropout before the adapter.", ge=0, lt=1, needs="rank")
    target_modules: tuple[str, ...] = option(
        ("all-linear",), "Modules to adapt; all-linear: every linear layer.", needs="rank"
    )
    rslora: bool = switch("Multiply by alpha / sqrt(rank) instead (rsLoRA).", needs="rank")
    dora: bool = switch("Also train the norm of each weight row (DoRA).", needs="rank")


class LoadingConfig(Section):
    """Model loading, data type and attention."""

    param_dtype: str = option("bf16", "Data type of the weights.", choices=DTYPES)
    attn_implementation: str = option(
        "flash_attention_2",
        "Attention implementation. The default is FlashAttention 2 if it can run, otherwise sdpa.",
    )
    experts_implementation: str | None = unset(
        "Kernel for mixture-of-experts layers; unset: the Transformers default.",
        choices=EXPERTS,
        not_yet="leave it out",
    )
    packing_samples: bool = switch("Concatenate samples instead of padding them.")
    load_in_4bit: bool = switch(
        "QLoRA: store frozen weights in 4 bits (NF4), including those of a teacher and a separate "
        "reference, but not those of reward models in RL.",
    )

    @property
    def ranks_per_slice(self) -> int:
        """The number of ranks that work on the same rows."""
        return 1


class DeepSpeedConfig(LoadingConfig):
    """DeepSpeed: precision, memory, parallelism."""

    zero_stage: int = option(2, "ZeRO stage.", ge=0, le=3)
    zpg: int = count(
        1,
        "Ranks that together keep a second copy of the weights for the backward pass (ZeRO++ hpZ, "
        "stage 3), such as those of a node; 1: no copy.",
    )
    adam_offload: bool = switch(
        "Keep the optimizer state in CPU memory and run the optimizer on the CPU.",
        unless="nvme_path",
    )
    param_offload: str = option(
        "none", "Where ZeRO 3 stores parameters between uses.", choices=("none", "cpu", "nvme")
    )
    nvme_path: str | None = unset(
        "Keep the optimizer state of ZeRO 3, and parameters with --ds.param_offload nvme, in "
        "temporary files in this folder on an NVMe drive, and run the optimizer on the CPU.",
        holds="place",
    )
    use_universal_ckpt: bool = switch(
        "Resume with a different number of processes or --ds.tensor_parallel_size, or switch "
        "between ZeRO stages 1 and 2.",
    )
    grad_accum_dtype: str | None = unset(
        "Data type for gradient accumulation; unset: fp32.", choices=DTYPES
    )
    overlap_comm: bool = switch("Overlap gradient reduction with the backward pass.")
    deepcompile: bool = switch("Use DeepSpeed's DeepCompile.", not_yet=COMPILES_TOO_OFTEN)
    torch_compile: bool = switch(
        "Compile the model with torch.compile.", not_yet=COMPILES_TOO_OFTEN
    )
    tensor_parallel_size: int = count(
        1, "Tensor-parallel size: ranks that each layer is split across."
    )
    ring_attn_size: int = count(1, "Ring attention size: ranks that each sequence is split across.")
    ring_attn_head_stride: int = count(
        1, "No effect: a ring sends all heads at once.", obsolete=True
    )
    lora: LoraConfig = LoraConfig()

    @property
    def offloads_optimizer(self) -> bool:
        """True if the optimizer runs on the CPU, with its state in CPU memory or on a drive."""
        return self.adam_offload or self.nvme_path is not None

    @property
    def ranks_per_copy(self) -> int:
        """The number of ranks that together keep a second copy of the weights; 1 for no copy."""
        return self.zpg if self.zero_stage == 3 else 1

    @property
    def sleeps(self) -> bool:
        """True if the training state is kept in CPU memory between updates."""
        return False

    def trained_stage(self, ranks: int) -> int:
        """Return the ZeRO stage to train with on `ranks` processes.

        The returned stage may differ from --ds.zero_stage. Stage 1 in bfloat16 with
        --ds.enable_sleep runs as stage 2, because DeepSpeed cannot move the optimizer state of
        stage 1. (Stage 0 cannot be combined with that flag.) Stage 0 in bfloat16 runs as stage 1,
        because DeepSpeed's stage 0 cannot accumulate bfloat16 gradients in float32; stage 0 with
        tensor parallelism also runs as stage 1, because DeepSpeed's stage 0 computes no gradient
        norm over split weights. Stage 2 on one process runs as stage 1, because there are no other
        ranks to shard gradients over, and stage 2 makes an additional copy of each micro-batch's
        gradients. All stages compute the same numbers.
        """
        if self.sleeps and self.param_dtype == "bf16":
            return max(2, self.zero_stage)
        if self.zero_stage == 0 and (self.param_dtype == "bf16" or self.tensor_parallel_size > 1):
            return 1
        if self.zero_stage == 2 and ranks == 1:
            return 1
        return self.zero_stage

    def data_slices(self, ranks: int) -> int:
        """Return the number of slices into which these ranks divide a batch (at least 1).

        Ranks that share sequences or layers get the same slice.
        """
        return max(1, ranks // self.ranks_per_slice)

    @property
    def ranks_per_slice(self) -> int:
        """The number of ranks that work on the same rows, at least 1."""
        return max(1, self.ring_attn_size * self.tensor_parallel_size)

    def unused(self) -> Iterator[Unused]:
        """Yield the flags that have no effect with the current settings."""
        if self.zero_stage not in (2, 3):
            yield Unused(["overlap_comm"], "without --zero_stage 2 or 3")
        if self.zero_stage != 3:
            yield Unused(["zpg"], "without --zero_stage 3")


class ScalarHeadConfig(Section):
    """Name of the scalar head."""

    value_head_prefix: str = option(
        "score", "Name of the scalar head; a stored name takes precedence."
    )


class LMDeepSpeedConfig(DeepSpeedConfig):
    """DeepSpeed and loading of a language model."""

    use_liger_kernel: bool = switch(
        "No effect: Liger's kernels are not used.",
        obsolete=True,
    )


class TokenizerConfig(Section):
    """Tokenizer."""

    disable_fast_tokenizer: bool = switch(
        "No effect: each tokenizer has only one implementation.", obsolete=True
    )
    max_len: int = count(2048, "Maximum tokens per sample (RL: prompt and response together).")


class FormatConfig(TokenizerConfig):
    """Tokenizer and prompt format."""

    input_template: str | None = unset(
        "Template with {} in place of the prompt, for prompts without a chat template.",
        unless="apply_chat_template",
    )
    apply_chat_template: bool = switch("Render prompts with the tokenizer's chat template.")


class DataConfig(FormatConfig):
    """Tokenizer and data."""

    dataloader_num_workers: int = option(0, "Worker processes that prepare batches.", ge=0)
    max_samples: int = count(1_000_000, "Maximum rows of each dataset and of their mixture.")
    layout: str = option(
        "auto",
        "Row layout. auto: detect it from the columns, unless *_key flags are set. columns: use "
        "the column flags.",
        choices=choices.LAYOUTS,
    )


class DatasetConfig(DataConfig):
    """Tokenizer and training data."""

    dataset: str = required(
        "Dataset: comma-separated files, folders or Hub names.", holds="dataset"
    )
    dataset_probs: str | None = unset(
        "Comma-separated probabilities; unset: use the datasets in order."
    )
    dataset_split: str = option("train", "Split of each dataset; files have a single split.")


class EndedTextConfig(Section):
    """Texts that end with the eos token."""

    space_before_eos: bool = option(True, "Add a space before an appended eos token.")


class OfflineDataConfig(EndedTextConfig, DatasetConfig):
    """Tokenizer, chat template and training data."""

    tokenizer_chat_template: str | None = unset(
        "Chat template, or a file with one, to use instead of the tokenizer's.",
        holds="place",
    )

    def unused(self) -> Iterator[Unused]:
        """Yield the flags that have no effect with the current settings."""
        if not (self.apply_chat_template or self.layout in ("auto", "arena")):
            yield Unused(
                ["tokenizer_chat_template"],
                "without --apply_chat_template or --layout auto or arena",
            )


class GroupConfig(Section):
    """The devices of a role."""

    num_nodes: int = count(1, "Nodes for this role.")
    num_gpus_per_node: int = count(
        8, "GPUs per node; on machines without GPUs, CPU processes per node."
    )


class ModelSourceConfig(Section):
    """Model source."""

    trust_remote_code: bool = switch("Allow Python code from model repositories to run.")


class TrainedModelConfig(Section):
    """The model to train."""

    model_name_or_path: str = required(
        "Folder or Hub name of a model with its tokenizer.", holds="model"
    )
    gradient_checkpointing_enable: bool = switch(
        "Recompute activations to save memory (RL: also in the critic)."
    )
    gradient_checkpointing_reentrant: bool = switch(
        "Use reentrant gradient checkpointing.",
        needs="gradient_checkpointing_enable",
    )
    gradient_checkpointing_every: int = count(
        1,
        "Recompute only every N-th layer, which is faster than all layers and takes more memory "
        "(RL: also in the critic).",
        needs="gradient_checkpointing_enable",
    )
    gradient_checkpointing_offload: bool = switch(
        "Keep the inputs of recomputed layers in CPU memory (RL: also in the critic).",
        needs="gradient_checkpointing_enable",
    )
    aux_loss_coef: float = option(
        0.0, "Weight of the experts' load-balancing loss (RL: also in the critic).", ge=0
    )


class ModelConfig(ModelSourceConfig, TrainedModelConfig):
    """The model to train."""
