"""Packed rows compared with single rows, in the dtype and attention that a GPU run uses."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from openrlhf.models.loading import load_causal_lm
from openrlhf.models.packed_attention import packed_sdpa
from openrlhf.models.policy import PolicyModel
from tests.gpu.place import DEVICE, SIZES, save_model
from tests.gpu.rehearsal import REHEARSAL
from tests.loading import load_spec

pytestmark = pytest.mark.gpu
LENGTHS = (3, 700, 64, 1, 257)


@pytest.mark.parametrize("attention", ["flash_attention_2", "sdpa"])
def test_packed_rows_get_the_same_scores_as_single_rows(
    attention: str, tmp_path: Path, record_property: Callable[[str, object], None]
):
    if attention == "flash_attention_2" and (REHEARSAL or find_spec("flash_attn") is None):
        pytest.skip(
            "FlashAttention is not available in a rehearsal"
            if REHEARSAL
            else "flash_attn is not installed"
        )
    save_model(tmp_path, num_hidden_layers=4, initializer_range=0.08)
    spec = load_spec(path=str(tmp_path), param_dtype="bf16", attention=attention, packing=True)
    model = PolicyModel(load_causal_lm(spec), packing=True).to(DEVICE)
    tokens = torch.randint(2, SIZES["vocab_size"], (sum(LENGTHS),), device=DEVICE)
    offsets = torch.tensor([0, *LENGTHS], device=DEVICE).cumsum(0)
    wanted = torch.ones_like(tokens, dtype=torch.bool)
    packed = model(tokens, offsets, wanted)
    rows = [
        model(
            row, torch.tensor([0, len(row)], device=DEVICE), torch.ones_like(row, dtype=torch.bool)
        ).logprobs
        for row in tokens.split(LENGTHS)
    ]
    off = (packed.logprobs - torch.cat(rows)).abs()
    record_property("mean_difference", float(off.mean()))
    assert off.mean() < 0.05
    # Changing a token in one document must not affect other documents.
    changed = tokens.clone()
    changed[LENGTHS[0] + 5] = (changed[LENGTHS[0] + 5] + 1) % SIZES["vocab_size"]
    again = model(changed, offsets, wanted).logprobs
    outside = torch.ones_like(wanted)
    outside[LENGTHS[0] : LENGTHS[0] + LENGTHS[1]] = False
    assert (again - packed.logprobs)[outside].abs().max() < 1e-3
    packed.logprobs.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("heads", "key_heads", "head_dim"), [(8, 2, 64), (9, 3, 64), (4, 4, 96)])
def test_packed_attention_and_its_gradient_match_float64_on_a_cpu(
    heads: int, key_heads: int, head_dim: int, window: int | None
):
    """FlashAttention gets packed rows on a GPU; the reference gets one document at a time."""
    number = sum(LENGTHS)
    given = []
    for count in (heads, key_heads, key_heads):
        given.append(torch.randn(1, count, number, head_dim, device=DEVICE, dtype=torch.bfloat16))
    exact = [each.double().cpu().requires_grad_() for each in given]
    rounded = [each.requires_grad_() for each in given]
    options: dict[str, Any] = {"document_lengths": LENGTHS, "sliding_window": window}
    offsets = torch.tensor([0, *LENGTHS], device=DEVICE).cumsum(0).int()
    module = torch.nn.Module()
    query, key, value = rounded
    attended, _ = packed_sdpa(module, query, key, value, None, document_offsets=offsets, **options)
    query, key, value = exact
    expected, _ = packed_sdpa(module, query, key, value, None, **options)
    weights = torch.randn_like(expected)
    (attended * weights.to(attended)).sum().backward()
    (expected * weights.to(attended).double().cpu()).sum().backward()
    assert relative(attended, expected) < 0.01
    for one, other in zip(rounded, exact, strict=True):
        assert one.grad is not None and other.grad is not None
        assert relative(one.grad, other.grad) < 0.01


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the norm of the difference relative to the norm of `other`."""
    exact = other.detach()
    return float((one.detach().double().cpu() - exact).norm() / exact.norm())
