"""DeepSpeed configuration dictionaries, built from the flags without a process group or device."""

from typing import Any

from openrlhf.config.shared import DeepSpeedConfig


def training_config(ds: DeepSpeedConfig, *, max_norm: float, ranks: int) -> dict[str, Any]:
    """Return the DeepSpeed configuration for a model trained on `ranks` processes.

    DeepSpeed does not manage accumulation windows: with `managed_gradient_accumulation` off, each
    backward pass accumulates and each step is applied, so that the caller decides on window
    boundaries and loss denominators.
    """
    zero = _zero_config(ds, ds.trained_stage(ranks))
    if ds.ranks_per_copy > 1:
        zero["zero_hpz_partition_size"] = ds.ranks_per_copy
    # For DeepSpeed, state on a drive is in CPU memory: see the module `drive`.
    if ds.offloads_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": ds.nvme_path is None}
    if ds.param_offload != "none":
        zero["offload_param"] = {"device": "cpu", "pin_memory": ds.param_offload == "cpu"}
    return _common_config(ds) | {
        "managed_gradient_accumulation": False,
        "zero_force_ds_cpu_optimizer": False,
        # allows optimizers that DeepSpeed does not know, such as Muon
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": max_norm,
        "zero_optimization": zero,
    }


def inference_config(ds: DeepSpeedConfig, *, offload: bool = False) -> dict[str, Any]:
    """Return the DeepSpeed configuration for a frozen model, which is sharded under ZeRO 3."""
    zero: dict[str, Any] = {"stage": 0}
    if ds.zero_stage == 3:
        zero = _zero_config(ds, 3)
        if offload:
            zero["offload_param"] = {"device": "cpu"}
    return _common_config(ds) | {"zero_optimization": zero}


def _common_config(ds: DeepSpeedConfig) -> dict[str, Any]:
    parallel: dict[str, Any] = {}
    if ds.tensor_parallel_size > 1:
        # The output head is not sharded, because it computes log-probabilities chunk by chunk.
        parallel["tensor_parallel"] = {
            "autotp_size": ds.tensor_parallel_size,
            "vocab_parallel_lm_head": False,
        }
    return parallel | {
        # DeepSpeed requires a value but does not use it, because windows define the batch sizes.
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 10**9,
        "log_level": "error",
        "bf16": {"enabled": ds.param_dtype == "bf16"},
        # Accumulate bfloat16 gradients in float32, because a window may have many micro-batches.
        "data_types": {"grad_accum_dtype": ds.grad_accum_dtype or "fp32"},
    }


def _zero_config(ds: DeepSpeedConfig, stage: int) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    if ds.overlap_comm and stage >= 2:
        zero["overlap_comm"] = True
    return zero


def with_bucket_sizes(config: dict[str, Any], hidden_size: int) -> dict[str, Any]:
    """Return the configuration with the ZeRO 3 bucket sizes for a hidden size.

    Transformers uses the same sizes. Other stages keep DeepSpeed's defaults.
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
