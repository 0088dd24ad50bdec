"""Loads a bfloat16 model under ZeRO 3, and compares its RoPE frequencies with the exact ones."""

import sys

import torch

from openrlhf.config.shared import DeepSpeedConfig
from openrlhf.models.policy import PolicyModel
from openrlhf.training.layout import RankLayout
from openrlhf.training.strategy import FrozenModel, Strategy
from tests.loading import load_spec


def main() -> None:
    """Raise AssertionError if the frequencies of the model in the given folder differ."""
    [_, path] = sys.argv
    ds = DeepSpeedConfig(zero_stage=3, param_dtype="bf16")
    strategy = Strategy(ds, RankLayout.from_flags(ds, processes=1), seed=0)
    spec = load_spec(path, param_dtype="bf16")
    model = FrozenModel(strategy, lambda: PolicyModel.load(spec))
    buffers = dict(model.on_device().named_buffers())
    [rotary] = [value for name, value in buffers.items() if name.endswith("rotary_emb.inv_freq")]
    exact = 1 / 10000 ** (torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    torch.testing.assert_close(rotary, exact.float())


if __name__ == "__main__":
    main()
