"""Logits of a few tokens, to compare two forms of a model: with an adapter and merged, or in memory
and in files.
"""

from typing import Any

import torch
from torch import Tensor, nn

from openrlhf.models.loading import DTYPES
from openrlhf.models.packed_attention import unpacked

PROBED_TOKENS = 16
# Mean differences that rounding to the stored type explains, in standard deviations of the logits.
LARGEST_GAPS = {"fp32": 1e-3, "fp16": 0.05, "bf16": 0.2}
# The same at half of the tokens. No other kernel, and no router that chooses another expert,
# explains more. The logits of unrelated models are 1.1 apart.
OTHER_MODELS = {"fp32": 0.02, "fp16": 0.5, "bf16": 0.5}


@torch.no_grad()
def probe_logits(model: nn.Module) -> Tensor:
    """Return the logits, or the values of a scalar head, of 16 tokens spread over the vocabulary,
    by Transformers' own forward.

    Collective under ZeRO 3.
    """
    hf: Any = model
    vocabulary = hf.config.get_text_config().vocab_size
    tokens = torch.arange(PROBED_TOKENS) * max(1, vocabulary // PROBED_TOKENS) % vocabulary
    values: list[
        Tensor
    ] = []  # of the head at every token: Transformers keeps one number of a scalar model
    head, training = _scalar_head(hf), hf.training

    def keep(_: nn.Module, __: object, output: Tensor) -> None:
        values.append(output)

    hook = head.register_forward_hook(keep) if head else None
    try:
        hf.eval()
        with unpacked(hf):
            logits = hf(
                input_ids=tokens[None].to(next(hf.parameters()).device), use_cache=False
            ).logits
    finally:
        hf.train(training)
        if hook:
            hook.remove()
    return (values[0].reshape(-1) if values else logits).float().cpu()


def _scalar_head(hf: Any) -> nn.Module | None:
    """The head of a scalar model, perhaps inside PEFT's wrapper; None for a language model."""
    prefix = hf.config.to_dict().get("value_head_prefix")
    named = (module for name, module in hf.named_modules() if name.rpartition(".")[2] == prefix)
    return next(named, None) if prefix else None


def explain_gap(expected: Tensor, found: Tensor, precision: str) -> str | None:
    """Return how far logits are apart, in words, if rounding to a data type does not explain it."""
    if expected.shape != found.shape:
        return f"of different shapes, {tuple(expected.shape)} and {tuple(found.shape)}"
    if _have_diverged(expected, found):
        return None
    gap, spread = float((found - expected).abs().mean()), float(expected.std())
    if gap <= LARGEST_GAPS[precision] * spread + _rounding(expected, precision):
        return None
    return f"{gap:.2g} apart on average, with a standard deviation of {spread:.2g}"


def are_of_another_model(expected: Tensor, found: Tensor, precision: str) -> bool:
    """Return whether logits are so far apart that the models are not the same, whatever computes
    them in this data type.

    The values of a scalar head may be nearly the same at all tokens, so their size counts instead
    of their deviation.
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
    """Return the rounding error of numbers that are nearly equal but far from 0, such as rewards of
    a trained model.
    """
    return 4 * torch.finfo(DTYPES[precision]).eps * float(logits.square().mean().sqrt())
