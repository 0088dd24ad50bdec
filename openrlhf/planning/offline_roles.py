"""The models of each process and their largest passes, for the flags of an offline command."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from openrlhf.config.shared import DeepSpeedConfig, TrainedModelConfig
from openrlhf.config.supervised import (
    DPOConfig,
    KDConfig,
    KTOConfig,
    PRMConfig,
    ReferencedConfig,
    RMConfig,
    SupervisedConfig,
)
from openrlhf.planning.model_files import read_shape
from openrlhf.planning.roles import DTYPE_BYTES, ModelRole, Pass, check_split
from openrlhf.planning.shapes import ATTENTION, MLP, ModelShape, PlanError, SplitError

# In a process reward model, this share of the tokens ends a step and therefore needs logits.
STEP_SHARE = 1 / 16


def frozen_role(
    name: str, shape: ModelShape, ds: DeepSpeedConfig, ranks: int, on_gpus: bool
) -> ModelRole:
    """Return the role of a frozen model on the same ranks as the trained model.

    Raises SplitError if the ranks cannot share the model's heads or split its layers, and PlanError
    if its weights are stored quantized, except in 4 bits for QLoRA.
    """
    check_split(
        "ds.tensor_parallel_size",
        ds.tensor_parallel_size,
        shape.kv_heads,
        what=f"key-value head(s) of the {name}",
    )
    if ds.tensor_parallel_size > 1 and {ATTENTION, MLP} <= set(shape.unsplit):
        raise SplitError(
            f"--ds.tensor_parallel_size {ds.tensor_parallel_size}: Transformers has no plan for "
            f"splitting the layers of {shape.model_type}. Use --ds.tensor_parallel_size 1 and "
            "--ds.zero_stage 3."
        )
    if shape.quantization and not (shape.quantization == "bitsandbytes" and ds.load_in_4bit):
        raise PlanError(
            f"The {name}'s weights are stored quantized ({shape.quantization}). Use the "
            "unquantized model, with --ds.load_in_4bit and --ds.lora.rank for QLoRA."
        )
    dtype = ds.param_dtype
    packed = ds.packing_samples
    return ModelRole(
        name=name,
        shape=shape,
        dtype=dtype,
        dp=ds.data_slices(ranks),
        tp=ds.tensor_parallel_size,
        sp=ds.ring_attn_size,
        zero_stage=3 if ds.zero_stage == 3 else 0,
        load_in_4bit=ds.load_in_4bit,
        flash=on_gpus and dtype != "fp32" and (packed or "flash" in ds.attn_implementation),
    )


def trained_role(
    role: ModelRole, config: Any, optimizer: str, model: TrainedModelConfig, ranks: int
) -> ModelRole:
    """Return a trained version of `role`, with gradient checkpointing as set in `model`."""
    ds: DeepSpeedConfig = config.ds
    lora = ds.lora
    return replace(
        role,
        zero_stage=ds.trained_stage(ranks),
        zpg=ds.ranks_per_copy,
        trained=True,
        optimizer=optimizer,
        grad_accum_dtype=ds.grad_accum_dtype or "fp32",
        adam_offload=ds.offloads_optimizer,
        param_offload=ds.param_offload != "none",
        optimizer_on_drive=ds.nvme_path is not None,
        weights_on_drive=ds.param_offload == "nvme",
        overlap_comm=ds.overlap_comm,
        sleeps=ds.sleeps,
        lora_rank=lora.rank,
        lora_modules=tuple(lora.target_modules),
        dora=lora.dora,
        ema=config.train.enable_ema,
        gradient_checkpointing=model.gradient_checkpointing_enable,
        checkpoint_every=model.gradient_checkpointing_every,
        checkpoint_offload=model.gradient_checkpointing_offload,
        keeps_logits="lm_head" in lora.target_modules and lora.rank > 0,
    )


def ring_part(tokens: int, ranks: int) -> int:
    """Return how many tokens of a row each rank of a ring gets, including padding."""
    return math.ceil(tokens / ranks)


def offline_roles(config: SupervisedConfig, ranks: int, on_gpus: bool) -> tuple[ModelRole, ...]:
    """Return the trained model and the frozen model of an offline command."""
    ds, train, length = config.ds, config.train, config.data.max_len
    shape = read_shape(config.model.model_name_or_path)
    if isinstance(config, RMConfig):
        shape = shape.as_scalar()
    rows = 2 if isinstance(config, RMConfig | DPOConfig | KTOConfig) else 1
    of_rank = max(1, train.batch_size // ds.data_slices(ranks))
    micro = min(train.micro_batch_size, of_rank)
    tokens = ring_part(micro * rows * length, ds.ring_attn_size)
    scored = tokens
    if isinstance(config, PRMConfig):
        scored = max(1, round(tokens * STEP_SHARE))
    scoring = Pass(tokens=tokens, longest=length, scored=scored, packed=ds.packing_samples)
    training = scoring
    if isinstance(config, KTOConfig):  # KTO trains only on the first text of each pair
        half = tokens // 2
        training = replace(scoring, tokens=half, scored=half)
    model = frozen_role("policy", shape, ds, ranks, on_gpus)
    model = trained_role(model, config, config.optim, config.model, ranks)
    model = replace(
        model,
        training=training,
        scoring=scoring,
        window=math.ceil(of_rank / micro),
        keeps_logits=model.keeps_logits or isinstance(config, KDConfig | PRMConfig),
    )
    if isinstance(config, KDConfig):
        has_logits = config.kd.top_k is None
        teacher_bytes = _teacher_bytes(config, scored)
        model = replace(model, teacher_bytes=teacher_bytes, teacher_logits=has_logits)
        if config.kd.served:
            return (model,)
        if has_logits:
            scoring = replace(scoring, scored=0)  # the student's passes compute the logits
        path, offload = config.kd.teacher_model, config.kd.teacher_offload
        teacher = frozen_role("teacher", read_shape(path), ds, ranks, on_gpus)
        return model, replace(teacher, scoring=scoring, param_offload=offload, keeps_logits=True)
    if not isinstance(config, ReferencedConfig) or config.reference_is_policy:
        return (model,)
    if not config.needs_reference:
        return (model,)
    path = config.ref.model_name_or_path or config.model.model_name_or_path
    reference = frozen_role("reference", read_shape(path), ds, ranks, on_gpus)
    return model, replace(reference, scoring=scoring, param_offload=config.ref.offload)


def _teacher_bytes(config: KDConfig, scored: int) -> int:
    """Return the size in bytes of the teacher's states, or of its top logits and their tokens.

    The size of the states includes the output layer's weights, which are copied if the teacher's
    weights are sharded or leave the device.
    """
    if config.kd.top_k:
        return 16 * scored * config.kd.top_k
    teacher = read_shape(config.kd.teacher_model)
    kept = scored * teacher.hidden
    if config.ds.zero_stage == 3 or config.kd.teacher_offload:
        kept += teacher.head_parameters
    return DTYPE_BYTES[config.ds.param_dtype] * kept
