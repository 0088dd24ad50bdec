"""Micro-batches of the frozen models: the reference, the teacher and reward models."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from openrlhf.config.learning import RLDeepSpeedConfig, RLFlags
from openrlhf.config.rollout import RewardConfig, RolloutConfig
from openrlhf.config.shared import DeepSpeedConfig
from openrlhf.core.batches import TokenRows
from openrlhf.training.strategy import FrozenModel
from openrlhf.workers.base import MicroBatchLimits, RoleSettings
from openrlhf.workers.frozen import ReferenceWorker, RewardModelSettings, RewardWorker
from tests.loading import load_spec
from tests.tiny import save_reward_model, save_tiny_model

TEXTS = [[2] * length for length in (400, *[100] * 6)]
ROWS = TokenRows.from_lists(TEXTS, [[True] * len(text) for text in TEXTS])
BUDGET = 700  # two micro-batches
BY_COST = [1, 6]  # rows per micro-batch if attention is expensive: the long row is alone
BY_TOKENS = [2, 5]  # rows per micro-batch if the cost is nearly linear: 500 tokens each
WIDE_MLP = 6400  # makes products with weights cost much more than attention


def one_rank(ds: DeepSpeedConfig) -> Any:
    """Return the strategy of a single process on a CPU, without a process group."""
    return SimpleNamespace(
        config=ds,
        device=torch.device("cpu"),
        loading=lambda config: nullcontext(),
        share_sequences=lambda module: module,
    )


def record_rows(model: FrozenModel) -> list[int]:
    """Return a list to which each of the model's forward passes appends its number of rows."""
    seen: list[int] = []
    model.on_device().register_forward_pre_hook(
        lambda module, arguments: seen.append(len(arguments[1]) - 1)
    )
    return seen


def test_reference_balances_token_budgets_by_its_attention_cost(tmp_path: Path) -> None:
    ds = RLDeepSpeedConfig(packing_samples=True, param_dtype="fp32")
    config = RLFlags(rollout=RolloutConfig(max_tokens_per_gpu=BUDGET), ds=ds)
    split: list[list[int]] = []
    for width in (64, WIDE_MLP):
        path = save_tiny_model(tmp_path / str(width), "llama", intermediate_size=width)
        settings = RoleSettings(config=config, load=load_spec(path, packing=True))
        reference = ReferenceWorker(one_rank(ds), settings)
        seen = record_rows(reference.model)
        reference.logprobs(ROWS)
        split.append(seen)
    assert split == [BY_COST, BY_TOKENS]


def test_each_reward_model_balances_token_budgets_by_its_own_attention_cost(
    tmp_path: Path,
) -> None:
    ds = RLDeepSpeedConfig(packing_samples=True, param_dtype="fp32")
    models: list[Path] = []
    for width in (64, WIDE_MLP):
        base = tmp_path / str(width)
        save_tiny_model(base, "llama", intermediate_size=width)
        models.append(save_reward_model(tmp_path / f"reward-{width}", base))
    settings = RewardModelSettings(
        models=tuple(load_spec(path, packing=True) for path in models),
        process_model=None,
        limits=MicroBatchLimits.of_forwards(RolloutConfig(max_tokens_per_gpu=BUDGET), ds),
        head_prefix="score",
        reward=RewardConfig(),
    )
    worker = RewardWorker(one_rank(ds), settings)
    seen = [record_rows(model) for model in worker.models]
    worker.rewards(ROWS)
    assert seen == [BY_COST, BY_TOKENS]


def test_frozen_model_accepts_a_module_without_a_configuration() -> None:
    """A task in a plugin may load any module."""
    model = FrozenModel(one_rank(RLDeepSpeedConfig()), lambda: torch.nn.Linear(2, 1))
    assert model(torch.ones(3, 2)).shape == (3, 1)
