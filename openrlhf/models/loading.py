"""Loads Transformers models as the flags say: dtype, attention, gradient checkpointing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from openrlhf.models import packed_attention

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


def load_causal_lm(spec: LoadSpec) -> PreTrainedModel:
    """A causal language model, ready to train. Raises ValueError naming the flag when it needs code of its own."""
    attention = spec.attention
    if spec.packing and attention == "sdpa":
        attention = packed_attention.NAME
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            spec.path,
            dtype=DTYPES[spec.param_dtype],
            attn_implementation=attention,
            trust_remote_code=spec.trust_remote_code,
        )
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ValueError(
            f"the model {spec.path} comes with code of its own; if you trust it, add --model.trust_remote_code"
        ) from error
    model.config.use_cache = False
    if spec.gradient_checkpointing:
        options: dict[str, Any] = {"use_reentrant": spec.reentrant}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    return model
