"""Logits of a few tokens, by which two forms of one model are compared: beside an adapter and merged, in memory and in files."""

from typing import Any

import torch
from torch import Tensor, nn

PROBED_TOKENS = 16
# Mean differences that rounding to the stored type explains, in standard deviations of the logits.
LARGEST_GAPS = {"fp32": 1e-3, "fp16": 0.05, "bf16": 0.2}


@torch.no_grad()
def probe_logits(model: nn.Module) -> Tensor:
    """Return the logits or the score of 16 tokens, spread over the vocabulary, by Transformers' own forward."""
    hf: Any = model
    vocabulary = hf.config.get_text_config().vocab_size
    tokens = torch.arange(PROBED_TOKENS) * max(1, vocabulary // PROBED_TOKENS) % vocabulary
    training = hf.training
    try:
        hf.eval()
        return hf(input_ids=tokens[None], use_cache=False).logits.float()
    finally:
        hf.train(training)


def logit_gap(expected: Tensor, found: Tensor) -> float:
    """Return the mean difference, in standard deviations of `expected`; of a single number, relative to it."""
    if expected.shape != found.shape:
        return float("inf")
    scale = expected.std() if expected.numel() > 1 else expected.abs().mean()
    return float((found - expected).abs().mean() / scale.clamp_min(1e-6))
