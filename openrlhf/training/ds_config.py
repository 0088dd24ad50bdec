"""DeepSpeed's configuration dictionaries, from the flags. Pure: no process group, no device."""

from typing import Any

from openrlhf.config.shared import DeepSpeedConfig


def training_config(ds: DeepSpeedConfig, *, max_norm: float, ranks: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration of a model that `ranks` processes train.

    The optimizer-step window is ours. With `managed_gradient_accumulation` off, every backward
    accumulates and every step steps, so the caller owns boundaries and denominators.
    """
    zero = _zero_config(ds, training_stage(ds, ranks))
    if ds.adam_offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    if ds.param_offload == "cpu":
        zero["offload_param"] = {"device": "cpu"}
    return _common_config(ds) | {
        "managed_gradient_accumulation": False,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": max_norm,
        "zero_optimization": zero,
    }


def training_stage(ds: DeepSpeedConfig, ranks: int) -> int:
    """Return the ZeRO stage that trains a model, which may differ from --ds.zero_stage.

    Stage 1 in bfloat16 with --ds.enable_sleep runs as stage 2: DeepSpeed cannot move the state of
    its optimizer. (Stage 0 is refused with that flag.) Stage 0 in bfloat16 runs as stage 1:
    DeepSpeed's stage 0 cannot sum bfloat16 gradients in float32. Stage 2 of one process runs as
    stage 1: there is no other process to share gradients with, and stage 2 copies the gradients of
    every micro-batch once more. The stages compute the same numbers.
    """
    if ds.sleeps and ds.param_dtype == "bf16":
        return max(2, ds.zero_stage)
    if ds.zero_stage == 0 and ds.param_dtype == "bf16":
        return 1
    if ds.zero_stage == 2 and ranks == 1:
        return 1
    return ds.zero_stage


def inference_config(ds: DeepSpeedConfig, *, offload: bool = False) -> dict[str, Any]:
    """Return DeepSpeed's configuration of a frozen model, sharded if the flags ask for ZeRO 3."""
    zero: dict[str, Any] = {"stage": 0}
    if ds.zero_stage == 3:
        zero = _zero_config(ds, 3)
        if offload:
            zero["offload_param"] = {"device": "cpu"}
    return _common_config(ds) | {"zero_optimization": zero}


def _common_config(ds: DeepSpeedConfig) -> dict[str, Any]:
    return {
        # Required by DeepSpeed and unused: the sizes are those of the window.
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 10**9,
        "log_level": "error",
        "bf16": {"enabled": ds.param_dtype == "bf16"},
        "fp16": {"enabled": ds.param_dtype == "fp16"},
        # Gradients of bfloat16 weights are summed in float32: a window may have many micro-batches.
        "data_types": {"grad_accum_dtype": ds.grad_accum_dtype or "fp32"},
    }


def _zero_config(ds: DeepSpeedConfig, stage: int) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    if ds.overlap_comm and stage >= 2:
        zero["overlap_comm"] = True
    return zero


def with_bucket_sizes(config: dict[str, Any], hidden_size: int) -> dict[str, Any]:
    """Return the configuration with ZeRO 3's bucket sizes for a hidden size.

    The sizes are those of Transformers' integration. Other stages keep DeepSpeed's defaults.
    """
    zero = config["zero_optimization"]
    if zero["stage"] != 3:
        return config
    sizes = {
        "reduce_bucket_size": hidden_size * hidden_size,
        "stage3_prefetch_bucket_size": int(0.9 * hidden_size * hidden_size),
        "stage3_param_persistence_threshold": 10 * hidden_size,
    }
    return config | {"zero_optimization": zero | sizes}
