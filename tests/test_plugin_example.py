"""The estimator of docs/extending.md, taken from there as it stands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from openrlhf.algorithms.advantages import ADVANTAGE_ESTIMATORS, shape_rewards
from openrlhf.config import choices
from tests.config.commands import ppo, violations
from tests.sources import ROOT


@pytest.fixture
def plugin(tmp_path: Path) -> Iterator[Path]:
    """The file; its name is gone from flags and registry afterwards."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/extending.md").read_text(), re.DOTALL)
    (code,) = [block for block in blocks if "advantage_estimator" in block]
    file = tmp_path / "median.py"
    file.write_text(code)
    yield file
    choices.ESTIMATORS.pop("median", None)
    ADVANTAGE_ESTIMATORS._choices.pop("median", None)


def test_its_name_is_a_choice_with_the_checks_of_the_built_in_ones(plugin: Path) -> None:
    line = f"--plugin {plugin} --algo.advantage.estimator median"
    (sentence,) = violations("train_ppo_ray", line)
    assert "--algo.advantage.estimator median compares samples of one prompt" in sentence
    config = ppo(f"{line} --rollout.n_samples_per_prompt 4")
    assert config.algo.advantage.gamma == 1.0


def test_its_baseline_is_the_median_of_the_prompts_rewards(plugin: Path) -> None:
    ppo(f"--plugin {plugin} --algo.advantage.estimator median --rollout.n_samples_per_prompt 3")
    rewards = torch.tensor([1.0, 5.0, 2.0, 9.0, 0.0, 0.0])
    groups = torch.tensor([7, 7, 7, 8, 8, 8])
    shaped = shape_rewards(rewards, groups, ADVANTAGE_ESTIMATORS["median"])
    assert shaped.tolist() == [-1.0, 3.0, 0.0, 9.0, 0.0, 0.0]
