"""Tests for RoPE frequencies under ZeRO."""

from pathlib import Path

from tests.ranks import run_ranks
from tests.tiny import save_tiny_model


def test_zero_3_does_not_round_rope_frequencies(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    path = save_tiny_model(tmp_path, "llama", hidden_size=256, rope_parameters=rope)
    run_ranks(1, "tests.training.rope_worker", path)
