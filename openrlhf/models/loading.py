"""Loads Transformers models as the flags say: dtype, attention, gradient checkpointing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import logging as transformers_logging

from openrlhf.models import packed_attention


class ModelError(ValueError):
    """A model cannot be loaded; the message says what to do."""


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

transformers_logging.disable_progress_bar()  # a bar per process and model tells the user nothing


@dataclass(frozen=True, kw_only=True)
class LoadSpec:
    """What has to be known to load a model. Built by the workers from the flags."""

    path: str
    param_dtype: str  # bf16, fp16 or fp32
    attention: str  # the value in effect, as the resolved configuration has it
    packing: bool
    gradient_checkpointing: bool = False
    reentrant: bool = False
    trust_remote_code: bool = False
    device_map: str | None = None  # auto: over this process's GPUs, layer by layer


def load_causal_lm(spec: LoadSpec) -> PreTrainedModel:
    """A causal language model, ready to train. Raises ValueError naming the flag when it needs code of its own."""
    check_is_causal(spec)
    with naming_the_flag(spec):
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(spec.path, **pretrained_options(spec))
    return prepared(model, spec)


def configuration(spec: LoadSpec) -> Any:
    """The stored configuration. Raises ModelError."""
    with naming_the_flag(spec):
        return AutoConfig.from_pretrained(spec.path, trust_remote_code=spec.trust_remote_code)


def check_is_causal(spec: LoadSpec) -> None:
    """Raise ModelError where the configuration is a reward model's or critic's: an output layer would be made up. Reads no weights."""
    for name in configuration(spec).architectures or []:
        if "SequenceClassification" in name:
            raise ModelError(
                f"{spec.path} is a reward model or critic ({name}), and no language model. Name one that is."
            )


def check_positions(spec: LoadSpec, max_len: int) -> None:
    """Raise ModelError where --data.max_len is more tokens than the model has positions for, and nothing stretches them."""
    stored = configuration(spec).get_text_config().to_dict()
    rope, positions = stored.get("rope_parameters") or {}, stored.get("max_position_embeddings") or max_len
    if max_len > positions and rope.get("rope_type", "default") == "default":
        raise ModelError(f"--data.max_len is {max_len}, but {spec.path} has {positions} positions: lower it.")


def pretrained_options(spec: LoadSpec) -> dict[str, Any]:
    """What `from_pretrained` is told about any model."""
    packed = spec.packing and spec.attention == "sdpa"
    return {
        "dtype": DTYPES[spec.param_dtype],
        "attn_implementation": packed_attention.NAME if packed else spec.attention,
        "trust_remote_code": spec.trust_remote_code,
        "device_map": spec.device_map,
    }


@contextmanager
def naming_the_flag(spec: LoadSpec) -> Iterator[None]:
    """Within it, a refusal to run a model's own code names the flag that allows it, and unreadable files are named. Raises ModelError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ModelError(f"the model in {spec.path} cannot be read (an incomplete download?): {error}") from error
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ModelError(
            f"the model {spec.path} comes with code of its own; if you trust it, add --model.trust_remote_code"
        ) from error


def prepared(model: PreTrainedModel, spec: LoadSpec) -> PreTrainedModel:
    """The model without a cache, and with gradient checkpointing where that is asked for."""
    if spec.gradient_checkpointing:
        options: dict[str, Any] = {"use_reentrant": spec.reentrant}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    return model


def stored_tensors(model: PreTrainedModel, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A parameter as the model's files hold it: Transformers stacks the experts that these list one by one."""
    yield from revert_weight_conversion(model, {name: tensor}).items()
