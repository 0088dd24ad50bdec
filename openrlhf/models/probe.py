"""Logits of a few tokens, for comparing two forms of a model.

The two forms are a model with an adapter and the merged model, or a model in memory and the same
model in files.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor, nn

from openrlhf.models.packed_attention import unpacked

PROBED_TOKENS = 16
# Mean differences that rounding to the stored dtype explains, in standard deviations of the logits.
LARGEST_GAPS = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}
# Median differences over the tokens, in standard deviations of the logits.
# A larger difference cannot come from a different kernel or a different choice of experts.
# The logits of unrelated models are 1.1 apart.
OTHER_MODELS = {torch.float32: 0.02, torch.float16: 0.5, torch.bfloat16: 0.5}


class LogitGap(NamedTuple):
    """A gap between the logits of two models that is too large to be explained by rounding."""

    text: str
    is_other_model: bool  # whether the gap is too large for two forms of the same model


@torch.no_grad()
def probe_logits(model: nn.Module) -> Tensor:
    """Return the logits of 16 tokens spread over the vocabulary, computed by Transformers alone.

    For a model with a scalar head, return its values instead. Under ZeRO 3, all ranks must call
    this function.
    """
    hf: Any = model
    vocabulary = hf.config.get_text_config().vocab_size
    tokens = torch.arange(PROBED_TOKENS) * max(1, vocabulary // PROBED_TOKENS) % vocabulary
    was_training = hf.training
    try:
        return plain_outputs(hf.eval(), tokens).float().cpu()
    finally:
        hf.train(was_training)


def plain_outputs(hf: Any, tokens: Int[Tensor, " T"]) -> Tensor:
    """Return Transformers' logits (T, V) of one sequence, or a scalar head's values (T,)."""
    inputs = {"input_ids": tokens[None].to(next(hf.parameters()).device), "use_cache": False}
    with unpacked(hf):
        if hf.get_output_embeddings() is not None:
            return hf(**inputs).logits[0]
        # Transformers itself returns only one value per sequence.
        head = hf.get_submodule(hf.config.to_dict().get("value_head_prefix") or "score")
        return head(hf.get_decoder()(**inputs).last_hidden_state)[0, :, 0]


def find_gap(expected: Tensor, found: Tensor, dtype: torch.dtype) -> LogitGap | None:
    """Return the gap between logits or values, or None if rounding to the dtype explains it.

    The limit for different models holds for any kernel that computes the logits in this dtype. A
    scalar head's values may be nearly equal at all tokens, so their limit is relative to their
    magnitude instead of their standard deviation.
    """
    if expected.shape != found.shape:
        shapes = f"{tuple(expected.shape)} and {tuple(found.shape)}"
        return LogitGap(f"of different shapes, {shapes}", is_other_model=True)
    if not expected.isfinite().all() and torch.equal(expected.isfinite(), found.isfinite()):
        return None  # both models have diverged
    gaps = (found - expected).abs()
    spread = float(expected.std())
    magnitude = float(expected.square().mean().sqrt())
    rounding = 4 * torch.finfo(dtype).eps * magnitude  # rounding error of values far from 0
    gap = float(gaps.mean())
    if gap <= LARGEST_GAPS[dtype] * spread + rounding:
        return None
    text = f"{gap:.2g} apart on average, with a standard deviation of {spread:.2g}"
    size = magnitude
    if expected.dim() > 1:
        size = spread
        gaps = gaps.mean(dim=-1)
    is_same = float(gaps.median()) <= OTHER_MODELS[dtype] * size + rounding
    return LogitGap(text, is_other_model=not is_same)
