"""Logits of a few tokens, for comparing two forms of a model.

The forms are a model with an adapter and the merged model, or a model in memory and in files.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from openrlhf.models.loading import DTYPES
from openrlhf.models.packed_attention import unpacked

PROBED_TOKENS = 16
# Mean differences that rounding to the stored dtype explains, in standard deviations of the logits.
LARGEST_GAPS = {"fp32": 1e-3, "fp16": 0.05, "bf16": 0.2}
# Median differences over the tokens, in the same unit. A different kernel, or a router that chooses
# a different expert, does not explain a larger difference. The logits of unrelated models are 1.1
# apart.
OTHER_MODELS = {"fp32": 0.02, "fp16": 0.5, "bf16": 0.5}


@torch.no_grad()
def probe_logits(model: nn.Module) -> Tensor:
    """Return the logits of 16 tokens spread over the vocabulary, computed by Transformers alone.

    For a model with a scalar head, return its values instead. Collective under ZeRO 3.
    """
    hf: Any = model
    vocabulary = hf.config.get_text_config().vocab_size
    tokens = torch.arange(PROBED_TOKENS) * max(1, vocabulary // PROBED_TOKENS) % vocabulary
    # The scalar head's values at every token. Transformers itself returns only one of them.
    values: list[Tensor] = []
    head = _scalar_head(hf)
    was_training = hf.training

    def keep(_: nn.Module, __: object, output: Tensor) -> None:
        values.append(output)

    hook: RemovableHandle | None = None
    if head is not None:
        hook = head.register_forward_hook(keep)
    try:
        hf.eval()
        with unpacked(hf):
            input_ids = tokens[None].to(next(hf.parameters()).device)
            logits = hf(input_ids=input_ids, use_cache=False).logits
    finally:
        hf.train(was_training)
        if hook is not None:
            hook.remove()
    if values:
        return values[0].reshape(-1).float().cpu()
    return logits.float().cpu()


def _scalar_head(hf: Any) -> nn.Module | None:
    """Return a scalar model's head, or PEFT's wrapper around it; None for a language model."""
    prefix = hf.config.to_dict().get("value_head_prefix")
    if not prefix:
        return None
    for name, module in hf.named_modules():
        if name.rpartition(".")[2] == prefix:
            return module
    return None


def explain_gap(expected: Tensor, found: Tensor, precision: str) -> str | None:
    """Describe the gap between logits, or return None if rounding to the dtype explains it."""
    if expected.shape != found.shape:
        return f"of different shapes, {tuple(expected.shape)} and {tuple(found.shape)}"
    if _have_diverged(expected, found):
        return None
    gap = float((found - expected).abs().mean())
    spread = float(expected.std())
    if gap <= LARGEST_GAPS[precision] * spread + _rounding(expected, precision):
        return None
    return f"{gap:.2g} apart on average, with a standard deviation of {spread:.2g}"


def are_of_another_model(expected: Tensor, found: Tensor, precision: str) -> bool:
    """Return whether logits are too far apart to be from the same model.

    The limit holds for any kernel that computes the logits in this dtype. A scalar head's values
    may be nearly equal at all tokens, so the limit is relative to their magnitude instead of their
    standard deviation.
    """
    if expected.shape != found.shape:
        return True
    if _have_diverged(expected, found):
        return False
    size = expected.std()
    if expected.dim() == 1:
        size = expected.square().mean().sqrt()
    gaps = (found - expected).abs()
    if expected.dim() > 1:
        gaps = gaps.mean(dim=-1)
    gap = float(gaps.median())
    return not gap <= OTHER_MODELS[precision] * float(size) + _rounding(expected, precision)


def _have_diverged(expected: Tensor, found: Tensor) -> bool:
    return not expected.isfinite().all() and torch.equal(expected.isfinite(), found.isfinite())


def _rounding(logits: Tensor, precision: str) -> float:
    """Return the rounding error of values that are nearly equal but far from 0.

    Examples are a trained model's rewards.
    """
    return 4 * torch.finfo(DTYPES[precision]).eps * float(logits.square().mean().sqrt())
