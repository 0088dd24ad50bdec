"""Tests for the length at which attention costs as many FLOPs as multiplying by the weights."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, PretrainedConfig

from openrlhf.models.cost import attention_length
from tests.tiny import tiny_config

SHORT, LONG = 8, 64


def operations(config: PretrainedConfig, tokens: int) -> int:
    """Return the operations of a forward pass whose attention does not skip masked scores."""
    hf = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        hf(torch.arange(tokens)[None] % 60, use_cache=False)
    return counter.get_total_flops()


@pytest.mark.parametrize("kind", ["llama", "qwen2-tied", "qwen3"])
def test_attention_length_equals_the_ratio_of_counted_operations(kind: str) -> None:
    """The count is a·n + b·n². Causal attention halves b, so the length is a ÷ (b ÷ 2)."""
    config = tiny_config(kind, num_hidden_layers=3)
    short, long = operations(config, SHORT), operations(config, LONG)
    quadratic = (long / LONG - short / SHORT) / (LONG - SHORT)
    linear = short / SHORT - quadratic * SHORT
    assert attention_length(config) == int(linear / (quadratic / 2))


def test_attention_length_counts_only_the_active_experts_of_a_token() -> None:
    dense = tiny_config("llama", intermediate_size=64)
    experts = tiny_config("mixtral", intermediate_size=32, num_experts_per_tok=2)
    assert attention_length(experts) == attention_length(dense)


def test_only_full_attention_layers_have_quadratic_cost() -> None:
    one_of_two = attention_length(tiny_config("gemma3"))
    all_layers = tiny_config("gemma3")
    all_layers.layer_types = ["full_attention"] * 2
    assert one_of_two == pytest.approx(2 * (attention_length(all_layers) or 0), abs=1)
    all_layers.layer_types = ["sliding_attention"] * 2
    assert attention_length(all_layers) is None
