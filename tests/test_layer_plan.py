"""Tests for splitting an architecture's layers over tensor-parallel ranks."""

from pathlib import Path

import pytest
from transformers import GPT2Config

from openrlhf.config.flags import UserError
from openrlhf.config.shared import DeepSpeedConfig
from openrlhf.layer_plan import COLUMN, ROW, split_patterns
from openrlhf.models.loading import LoadSpec, configuration
from tests.tiny import save_tiny_model, tiny_config


@pytest.mark.parametrize(
    ("heads", "ranks", "nearest"), [(2, 3, 2), (2, 4, 2), (1, 2, 1), (4, 3, 2), (8, 6, 4)]
)
def test_error_for_heads_that_ranks_cannot_divide_names_the_nearest_size(
    heads: int, ranks: int, nearest: int
) -> None:
    config = tiny_config("llama", num_attention_heads=2 * heads, num_key_value_heads=heads)
    fix = f"Use --ds.tensor_parallel_size {nearest},"
    with pytest.raises(UserError, match=f"size {ranks} .* {heads} key-value head.*{fix}"):
        split_patterns(config, ranks)


def test_error_for_an_architecture_without_a_plan_names_the_alternative() -> None:
    with pytest.raises(UserError, match=r"gpt2.*--ds.zero_stage 3"):
        split_patterns(GPT2Config(), 2)


def test_experts_are_not_split() -> None:
    patterns = split_patterns(tiny_config("mixtral"), 2)
    assert patterns[ROW] and all("self_attn" in name for name in patterns[ROW] + patterns[COLUMN])


def test_models_that_cannot_be_split_are_rejected_before_they_are_loaded(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    spec = LoadSpec(path=str(tmp_path), ds=DeepSpeedConfig(tensor_parallel_size=4))
    with pytest.raises(UserError, match=r"--ds.tensor_parallel_size 4"):
        configuration(spec)
