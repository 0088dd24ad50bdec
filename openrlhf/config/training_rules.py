"""Rules and notices of training commands; `rules` says what a rule is."""

from collections.abc import Iterator
from typing import Any

from openrlhf.config.flags import value_at
from openrlhf.config.rules import is_file
from openrlhf.config.shared import (
    CheckpointConfig,
    DeepSpeedConfig,
    EvalConfig,
    TrainConfig,
    TrainedModelConfig,
)


def weight_violations(ds: DeepSpeedConfig) -> Iterator[str]:
    """Yield what is wrong with adapters, data types and offload."""
    if ds.lora.rank and not ds.lora.target_modules:
        yield "--ds.lora.target_modules names no layer: leave it out to adapt every layer."
    if ds.lora.dora and ds.zero_stage == 3:
        yield (
            "<ds.lora.dora> reads whole weights, but with <ds.zero_stage> each rank has only a "
            "part of them: use 0, 1 or 2."
        )
    if ds.load_in_4bit and not ds.lora.rank:
        yield (
            "<ds.load_in_4bit> freezes the weights of the model: train adapters with "
            "--ds.lora.rank."
        )
    if ds.param_dtype == "fp16":
        yield "<ds.param_dtype> is not available yet: use bf16."
    if ds.adam_offload and ds.zero_stage == 0:
        yield "<ds.adam_offload> needs --ds.zero_stage 1, 2 or 3."
    if ds.param_offload != "none" and ds.zero_stage != 3:
        yield "<ds.param_offload> needs --ds.zero_stage 3."
    if ds.param_offload == "nvme":
        yield "<ds.param_offload> is not available yet: use cpu."


def average_violations(ds: DeepSpeedConfig, train: TrainConfig) -> Iterator[str]:
    """Yield a violation if a checkpoint is converted whose average cannot be."""
    if ds.use_universal_ckpt and ds.zero_stage == 3 and train.enable_ema:
        yield (
            "--ds.use_universal_ckpt cannot convert the average of --train.enable_ema, which "
            "<ds.zero_stage> has partitioned: continue with the same number of processes, or "
            "leave out --train.enable_ema."
        )


def router_violations(model: TrainedModelConfig, section: str) -> Iterator[str]:
    """Yield a violation if the loss of the experts does not reach the model's routers."""
    reentrant = model.gradient_checkpointing_enable and model.gradient_checkpointing_reentrant
    if model.aux_loss_coef and reentrant:
        yield (
            f"<{section}.aux_loss_coef> would not reach the routers, which run without a graph "
            f"under --{section}.gradient_checkpointing_reentrant. Leave out that flag."
        )


def patience_violations(evaluation: EvalConfig, ckpt: CheckpointConfig) -> Iterator[str]:
    """Yield what --eval.patience lacks: evaluations, a metric, or a checkpoint."""
    if not evaluation.patience:
        return
    if not evaluation.dataset:
        yield "<eval.patience> counts evaluations of --eval.dataset, which is not given: give it."
    if ckpt.best_metric_key == "none":
        yield (
            "<eval.patience> follows --ckpt.best_metric_key, which is none: name a metric, or "
            "leave it out."
        )
    if ckpt.disable_ds:
        yield (
            "<eval.patience> exports the best weights from their checkpoint, which "
            "--ckpt.disable_ds does not write: leave one of them out."
        )


def checkpoint_notices(ckpt: CheckpointConfig) -> Iterator[str]:
    """Yield notices about checkpoints that hold nothing, or replace others."""
    if not ckpt.saves:
        return
    if ckpt.disable_ds and not ckpt.save_hf:
        yield "--ckpt.save_steps saves nothing: --ckpt.disable_ds is on and --ckpt.save_hf off."
    if ckpt.has_earlier and not ckpt.load_enable:
        yield (
            "<ckpt.path> has checkpoints of an earlier run: this run replaces those of the same "
            "steps. --ckpt.load_enable continues from the newest one; another --ckpt.path keeps "
            "them all."
        )


def held_out_notices(config: Any, dataset: str, split: str) -> Iterator[str]:
    """Yield a notice if the evaluation dataset is the training dataset, whose flags have these
    paths.
    """
    evaluation, trained = config.eval, value_at(config, dataset)
    same_split = evaluation.split == value_at(config, split)
    if is_file(trained):
        same_split = True  # a file has a single split
    if evaluation.dataset and evaluation.dataset == trained and same_split:
        yield (
            f"<eval.dataset> is the training data (--{dataset}), so the evaluation does not show "
            "whether the model generalizes. Name rows that are not trained on."
        )


def rank_violations(batch_size: int, ranks: int, *, micro: int, what: str) -> Iterator[str]:
    """Yield a violation unless the batch is whole micro-batches on each rank.

    `what` says where `ranks` comes from.
    """
    each, rest = divmod(batch_size, ranks)
    if rest:
        yield (
            f"<train.batch_size> is not divisible by the {ranks} data-parallel ranks ({what}): use "
            f"{max(1, each) * ranks} or {(each + 1) * ranks}."
        )
    elif each % max(1, micro):
        yield (
            f"<train.batch_size> on {ranks} rank(s) ({what}) gives each rank {each} samples, not a "
            f"multiple of --train.micro_batch_size {micro}."
        )
