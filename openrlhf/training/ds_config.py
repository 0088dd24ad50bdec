"""From our configuration to DeepSpeed's dictionaries. Pure functions: no process group, no device."""

from typing import Any

from openrlhf.config.shared import DeepSpeedConfig


def training_config(engine: DeepSpeedConfig, *, max_norm: float, ranks: int) -> dict[str, Any]:
    """DeepSpeed's configuration of a model that `ranks` processes train.

    The optimizer-step window is ours. With `managed_gradient_accumulation` off, every backward
    accumulates and every step steps, so the caller owns boundaries and denominators.
    """
    return _common(engine) | {
        "managed_gradient_accumulation": False,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": max_norm,
        "zero_optimization": _zero(engine, training_stage(engine, ranks))
        | _offloaded(optimizer=engine.adam_offload, param=engine.param_offload == "cpu"),
    }


def training_stage(engine: DeepSpeedConfig, ranks: int) -> int:
    """The ZeRO stage in which a model is trained: stage 1 or 2 in three cases in which it computes
    the same.

    Stage 0 in bfloat16: DeepSpeed's stage 0 cannot sum bfloat16 gradients in float32. Stage 2 of
    one process, which has nobody to share gradients with: it would copy the gradients of every
    micro-batch once more. Stages 0 and 1 in bfloat16 with --ds.enable_sleep run as stage 2, because
    DeepSpeed's optimizer of the others cannot be moved.
    """
    if engine.sleeps and engine.param_dtype == "bf16":
        return max(2, engine.zero_stage)
    unsummed = engine.zero_stage == 0 and engine.param_dtype == "bf16"
    alone = engine.zero_stage == 2 and ranks == 1
    return 1 if unsummed or alone else engine.zero_stage


def inference_config(engine: DeepSpeedConfig, *, offload: bool = False) -> dict[str, Any]:
    """DeepSpeed's configuration of a frozen model: sharded with ZeRO 3 if the trained model is,
    otherwise whole.
    """
    zero = _zero(engine, 3) | _offloaded(param=offload) if engine.zero_stage == 3 else {"stage": 0}
    return _common(engine) | {"zero_optimization": zero}


def _common(engine: DeepSpeedConfig) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,  # required by DeepSpeed; the real sizes are the window's
        "steps_per_print": 10**9,
        "log_level": "error",
        "bf16": {"enabled": engine.param_dtype == "bf16"},
        "fp16": {"enabled": engine.param_dtype == "fp16"},
        # Gradients of bfloat16 weights are summed in float32: a window may have many micro-batches.
        "data_types": {"grad_accum_dtype": engine.grad_accum_dtype or "fp32"},
    }


def _zero(engine: DeepSpeedConfig, stage: int) -> dict[str, Any]:
    return {"stage": stage} | ({"overlap_comm": True} if engine.overlap_comm and stage >= 2 else {})


def _offloaded(**parts: bool) -> dict[str, Any]:
    return {f"offload_{part}": {"device": "cpu"} for part, on in parts.items() if on}


def with_bucket_sizes(config: dict[str, Any], hidden_size: int) -> dict[str, Any]:
    """The configuration; with ZeRO 3, bucket sizes are those of Transformers' integration for this
    hidden size.
    """
    zero = config["zero_optimization"]
    sizes = {
        "reduce_bucket_size": hidden_size * hidden_size,
        "stage3_prefetch_bucket_size": int(0.9 * hidden_size * hidden_size),
        "stage3_param_persistence_threshold": 10 * hidden_size,
    }
    return config | {"zero_optimization": zero | sizes if zero["stage"] == 3 else zero}
