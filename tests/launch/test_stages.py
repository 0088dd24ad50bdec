"""Tests for the stages of a run: which columns are computed, by which role, and when."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from openrlhf.config.options import parse_config
from openrlhf.config.ppo import PPOConfig
from openrlhf.launch.stages import RunStages, make_stages
from openrlhf.trainers.stages import ColumnStage, Stage
from tests.e2e.commands import as_arguments
from tests.tiny import tiny_config


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "plain"
    tiny_config("qwen2-tied").save_pretrained(folder)
    return folder


def stages_of(model: Path, **changes: Any) -> RunStages:
    """Return the stages of a run with all roles."""
    flags = {
        "actor.model_name_or_path": model,
        "algo.advantage.estimator": "gae",
        "algo.distill.teacher": model,
        "reward.model_name_or_path": model,
        "data.prompt_dataset": "owner/prompts",
        **changes,
    }
    config = parse_config(PPOConfig, as_arguments(flags), command="train_ppo_ray")
    groups: Any = {}
    for role in ("actor", "ref", "teacher", "critic", "reward"):
        groups[role] = SimpleNamespace(role=role)
    return make_stages(config, groups)


def computed(stages: Sequence[Stage]) -> dict[str | None, str]:
    """Return the role that computes each column. The rewards have the name None."""
    roles: dict[str | None, str] = {}
    for stage in stages:
        roles[stage.writes] = stage.by.role if isinstance(stage, ColumnStage) else "reward"
    return roles


ALL = {
    None: "reward",
    "old_logprobs": "actor",
    "ref_logprobs": "ref",
    "teacher_logprobs": "teacher",
    "values": "critic",
}


def test_batch_of_a_synchronous_run_gets_rewards_and_all_columns(model: Path) -> None:
    stages = stages_of(model)
    assert computed(stages.of_prompt) == {}
    assert computed(stages.of_batch) == ALL


def test_dynamic_filter_gets_the_rewards_of_each_prompt(model: Path) -> None:
    stages = stages_of(
        model, **{"algo.dynamic_filtering_enable": True, "rollout.n_samples_per_prompt": 2}
    )
    assert computed(stages.of_prompt) == {None: "reward"}
    assert None not in computed(stages.of_batch)


def test_asynchronous_run_asks_only_the_policy_after_the_batch_is_complete(model: Path) -> None:
    stages = stages_of(model, **{"train.async_enable": True})
    early, late = computed(stages.of_prompt), computed(stages.of_batch)
    assert early.keys() | {"old_logprobs"} == ALL.keys()
    assert "actor" not in early.values()
    assert late.keys() == ALL.keys() - {None}  # columns that are present are not computed again
