"""Logits of a few tokens, by which two forms of one model are compared: beside an adapter and merged, in memory and in files."""

from typing import Any

import torch
from torch import Tensor, nn

from openrlhf.models.loading import DTYPES
from openrlhf.models.packed_attention import unpacked

PROBED_TOKENS = 16
# Mean differences that rounding to the stored type explains, in standard deviations of the logits.
LARGEST_GAPS = {"fp32": 1e-3, "fp16": 0.05, "bf16": 0.2}


@torch.no_grad()
def probe_logits(model: nn.Module) -> Tensor:
    """Return the logits, or the values of a scalar head, of 16 tokens spread over the vocabulary, by Transformers' own forward.

    Collective under ZeRO 3.
    """
    hf: Any = model
    vocabulary = hf.config.get_text_config().vocab_size
    tokens = torch.arange(PROBED_TOKENS) * max(1, vocabulary // PROBED_TOKENS) % vocabulary
    values: list[Tensor] = []  # of the head at every token: Transformers keeps one number of a scalar model
    head, training = _scalar_head(hf), hf.training

    def keep(_: nn.Module, __: object, output: Tensor) -> None:
        values.append(output)

    hook = head.register_forward_hook(keep) if head else None
    try:
        hf.eval()
        with unpacked(hf):
            logits = hf(input_ids=tokens[None].to(next(hf.parameters()).device), use_cache=False).logits
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
    if not expected.isfinite().all() and torch.equal(expected.isfinite(), found.isfinite()):
        return None  # a model that has diverged
    gap, spread = float((found - expected).abs().mean()), float(expected.std())
    # Trained reward models may give nearly equal numbers far from 0, whose rounding exceeds their deviation.
    rounding = 4 * torch.finfo(DTYPES[precision]).eps * float(expected.square().mean().sqrt())
    if gap <= LARGEST_GAPS[precision] * spread + rounding:
        return None
    return f"{gap:.2g} apart on average, with a standard deviation of {spread:.2g}"
