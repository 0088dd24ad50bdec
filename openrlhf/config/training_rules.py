"""Rules and notices for training commands. See the module `rules` for the definition of a rule."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from openrlhf.config import machine
from openrlhf.config.choices import OPTIMIZERS
from openrlhf.config.flags import value_at
from openrlhf.config.optimizer import OptimizerConfig
from openrlhf.config.rules import is_file
from openrlhf.config.shared import CheckpointConfig, DeepSpeedConfig, EvalConfig, TrainedModelConfig

BITSANDBYTES = ">=0.50"  # supported versions, the same as in the extra `qlora`


def weight_violations(ds: DeepSpeedConfig) -> Iterator[str]:
    """Yield violations of the rules for adapters, data types and offload."""
    if ds.lora.rank and not ds.lora.target_modules:
        yield "--ds.lora.target_modules is empty: leave it out to adapt every layer."
    if ds.lora.dora and ds.zero_stage == 3:
        yield (
            "<ds.lora.dora> needs full weights, but with <ds.zero_stage> each rank has only a "
            "shard of them: use 0, 1 or 2."
        )
    if ds.load_in_4bit and not ds.lora.rank:
        yield ("<ds.load_in_4bit> freezes the model's weights: train adapters with --ds.lora.rank.")
    if ds.load_in_4bit:
        yield from bitsandbytes_violations("ds.load_in_4bit", otherwise="leave it out")
    if ds.param_dtype == "fp16":
        yield "<ds.param_dtype> is not available yet: use bf16."
    if ds.trained_stage(1) == 0 and ds.grad_accum_dtype not in (None, "fp32"):
        yield "<ds.grad_accum_dtype> needs --ds.zero_stage 1, 2 or 3 with <ds.param_dtype>."
    if ds.adam_offload and ds.zero_stage == 0:
        yield "<ds.adam_offload> needs --ds.zero_stage 1, 2 or 3."
    if ds.param_offload != "none" and ds.zero_stage != 3:
        yield "<ds.param_offload> needs --ds.zero_stage 3."
    if ds.param_offload == "nvme" and ds.nvme_path is None:
        yield "<ds.param_offload> needs --ds.nvme_path, a folder on an NVMe drive."
    if ds.nvme_path is not None and not os.path.isabs(ds.nvme_path):
        yield (
            "<ds.nvme_path> must be an absolute path, because the processes of a run may start in "
            "different folders."
        )
    if ds.nvme_path is not None and ds.zero_stage != 3:
        yield (
            "<ds.nvme_path> needs --ds.zero_stage 3. With ZeRO 1 or 2, use --ds.adam_offload, "
            "which keeps the optimizer state in CPU memory."
        )


def process_violations(ds: DeepSpeedConfig, processes: int) -> Iterator[str]:
    """Yield a violation if launched processes cannot share sequences and layers evenly."""
    size = ds.ranks_per_slice
    fix = f"start a multiple of {size} processes, for example with torchrun --nproc_per_node {size}"
    what = f"The number of processes, {processes},"
    yield from slice_violations(ds, processes, what=what, fix=fix)


def slice_violations(
    ds: DeepSpeedConfig, processes: int, *, what: str, fix: str = "change one of these numbers"
) -> Iterator[str]:
    """Yield a violation if the processes cannot share sequences and layers evenly.

    `what` describes the origin of `processes`.
    """
    if processes % ds.ranks_per_slice == 0:
        return
    flags: list[str] = []
    if ds.ring_attn_size > 1:
        flags.append(f"--ds.ring_attn_size {ds.ring_attn_size}")
    if ds.tensor_parallel_size > 1:
        flags.append(f"--ds.tensor_parallel_size {ds.tensor_parallel_size}")
    yield (
        f"{what} is not a multiple of the {ds.ranks_per_slice} ranks that work on the same rows "
        f"({' x '.join(flags)}): {fix}."
    )


def partition_violations(ds: DeepSpeedConfig, ranks: int, *, what: str) -> Iterator[str]:
    """Yield a violation if the ranks cannot be divided into groups of size --ds.zpg.

    For messages, `what` describes where `ranks` comes from.
    """
    if ds.ranks_per_copy == 1:
        return
    if ds.tensor_parallel_size > 1:
        yield (
            "<ds.zpg> cannot be combined with <ds.tensor_parallel_size>, because neighboring ranks "
            "then hold different parts of the layers: leave out one of them."
        )
    if ranks % ds.zpg:
        yield (
            f"<ds.zpg> does not divide the {ranks} rank(s) ({what}) that share the weights: use a "
            f"divisor of {ranks}."
        )


def optimizer_violations(
    optimizer: OptimizerConfig, ds: DeepSpeedConfig, section: str = ""
) -> Iterator[str]:
    """Yield violations of the rules for an optimizer, whose flags start with `section`."""
    traits = OPTIMIZERS[optimizer.optim]
    if ds.use_universal_ckpt and not traits.has_universal_state:
        yield (
            f"<{section}optim>: --ds.use_universal_ckpt converts only the state of adam. Resume "
            "with the same number of processes and omit the flag."
        )
    if traits.needs_bitsandbytes:
        yield from bitsandbytes_violations(f"{section}optim", otherwise="use adam")


def bitsandbytes_violations(flag: str, *, otherwise: str) -> Iterator[str]:
    """Yield a violation if this machine has no supported version of bitsandbytes for a flag.

    `otherwise` describes what to do without the package. A plan does not need the package.
    """
    from packaging.specifiers import SpecifierSet  # needed only with these flags

    if machine.only_plans:
        return
    package = machine.installed("bitsandbytes")
    if package is None:
        found = "which is not installed"
    elif SpecifierSet(BITSANDBYTES).contains(package.version, prereleases=True):
        return
    else:
        found = f"but {package.version} is installed"
    yield (
        f"<{flag}> needs the package bitsandbytes {BITSANDBYTES}, {found}: pip install -e "
        f"'.[qlora]' in the checkout of this project, or {otherwise}."
    )


def muon_notices(
    optimizer: OptimizerConfig, given: Mapping[str, Any], section: str = ""
) -> Iterator[str]:
    """Yield a notice if Muon, whose flags start with `section`, has its default learning rate."""
    if optimizer.optim == "muon" and f"{section}muon.lr" not in given:
        yield (
            f"<{section}muon.lr> is the default, a rate for training from scratch. To fine-tune a "
            "model, start with 0.2 x √(hidden size) x the learning rate for AdamW."
        )


def router_violations(model: TrainedModelConfig, section: str) -> Iterator[str]:
    """Yield a violation if the experts' load-balancing loss cannot reach the routers."""
    reentrant = model.gradient_checkpointing_enable and model.gradient_checkpointing_reentrant
    if model.aux_loss_coef and reentrant:
        yield (
            f"<{section}.aux_loss_coef> would not reach the routers, which run without an "
            f"autograd graph under --{section}.gradient_checkpointing_reentrant. Leave out that "
            "flag."
        )


def patience_violations(evaluation: EvalConfig, ckpt: CheckpointConfig) -> Iterator[str]:
    """Yield each missing requirement of --eval.patience: evaluations, a metric or a checkpoint."""
    if not evaluation.patience:
        return
    if not evaluation.dataset:
        yield "<eval.patience> requires --eval.dataset, which is not set."
    if ckpt.best_metric_key == "none":
        yield (
            "<eval.patience> monitors --ckpt.best_metric_key, which is none: set a metric or "
            "leave it out."
        )
    if ckpt.disable_ds:
        yield (
            "<eval.patience> exports the best weights from a checkpoint, which --ckpt.disable_ds "
            "does not write: leave one of them out."
        )


def checkpoint_notices(ckpt: CheckpointConfig) -> Iterator[str]:
    """Yield notices about checkpoints that contain nothing or replace earlier ones."""
    if not ckpt.saves:
        return
    if ckpt.disable_ds and not ckpt.save_hf:
        yield "--ckpt.save_steps saves nothing: --ckpt.disable_ds is on and --ckpt.save_hf is off."
    if any(Path(ckpt.path).glob("*.manifest.json")) and not ckpt.load_enable:
        yield (
            "<ckpt.path> has checkpoints from an earlier run: this run replaces those with the "
            "same step numbers. Use --ckpt.load_enable to resume from the newest one, or a "
            "different --ckpt.path to keep them all."
        )


def held_out_notices(config: Any, dataset: str, split: str) -> Iterator[str]:
    """Yield a notice if the evaluation data is the training data. `dataset` and `split` are the
    paths of the training data's flags.
    """
    evaluation = config.eval
    trained = value_at(config, dataset)
    same_split = evaluation.split == value_at(config, split)
    if is_file(trained):
        same_split = True  # a file has only one split
    if evaluation.dataset and evaluation.dataset == trained and same_split:
        yield (
            f"<eval.dataset> is the training data (--{dataset}), so the evaluation does not show "
            "whether the model generalizes. Use rows that are not trained on."
        )


def rank_violations(batch_size: int, ranks: int, *, micro: int, what: str) -> Iterator[str]:
    """Yield a violation unless each rank gets a whole number of micro-batches.

    For messages, `what` describes where `ranks` comes from.
    """
    each, rest = divmod(batch_size, ranks)
    lower = f"{each * ranks} or " if each else ""
    if rest:
        yield (
            f"<train.batch_size> is not divisible by the {ranks} data-parallel ranks ({what}): use "
            f"{lower}{(each + 1) * ranks}."
        )
    elif each % max(1, micro):
        nearest = max(size for size in range(1, micro) if each % size == 0)
        yield (
            f"<train.batch_size> on {ranks} rank(s) ({what}) gives each rank {each} samples, not a "
            f"multiple of --train.micro_batch_size {micro}: use --train.micro_batch_size {nearest}."
        )
