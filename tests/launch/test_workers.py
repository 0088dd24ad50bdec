"""Tests for the worker class and the settings of each role."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from openrlhf.config.groups import role_groups
from openrlhf.config.options import parse_config
from openrlhf.config.ppo import PPOConfig
from openrlhf.launch.workers import worker_of
from openrlhf.workers.base import RoleSettings
from openrlhf.workers.critic import CriticWorker
from openrlhf.workers.frozen import ReferenceWorker, RewardModelSettings, RewardWorker
from openrlhf.workers.policy import PolicyWorker
from tests.e2e.commands import as_arguments
from tests.tiny import tiny_config

PROMPTS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    for name in ("policy", "critic", "teacher", "reward"):
        tiny_config("qwen2-tied").save_pretrained(made / name)
    return made


def config_of(folder: Path, **changes: Any) -> PPOConfig:
    flags = {
        "actor.model_name_or_path": folder / "policy",
        "critic.model_name_or_path": folder / "critic",
        "reward.model_name_or_path": folder / "reward",
        "algo.advantage.estimator": "gae",
        "algo.distill.teacher": folder / "teacher",
        "critic.freezing_steps": 1,
        "data.prompt_dataset": "owner/prompts",
        "rollout.batch_size": 4,
        "rollout.n_samples_per_prompt": 1,
        "train.batch_size": 4,
        "train.micro_batch_size": 1,
        "rollout.micro_batch_size": 1,
        **changes,
    }
    return parse_config(PPOConfig, as_arguments(flags), command="train_ppo_ray")


def test_every_role_of_a_run_loads_its_own_model(folder: Path) -> None:
    config = config_of(folder)
    loaded: dict[str, tuple[type, str]] = {}
    for group in role_groups(config):
        for role in group.roles:
            worker, settings = worker_of(config, PROMPTS, role)
            if isinstance(settings, RoleSettings):
                loaded[role] = (worker, settings.load.path)
            else:
                assert isinstance(settings, RewardModelSettings)
                loaded[role] = (worker, settings.models[0].path)
    assert loaded == {
        "actor": (PolicyWorker, str(folder / "policy")),
        "ref": (ReferenceWorker, str(folder / "policy")),
        "teacher": (ReferenceWorker, str(folder / "teacher")),
        "critic": (CriticWorker, str(folder / "critic")),
        "reward": (RewardWorker, str(folder / "reward")),
    }


def test_policy_schedule_leaves_out_the_steps_that_train_only_the_critic(folder: Path) -> None:
    config = config_of(folder)
    steps: dict[str, int] = {}
    for role in ("actor", "critic"):
        _, settings = worker_of(config, PROMPTS, role)
        assert isinstance(settings, RoleSettings)
        steps[role] = settings.total_steps
    assert steps == {"actor": 1, "critic": 2}
