"""The estimator and the preference loss from docs/extending.md, used verbatim."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from openrlhf.algorithms.advantages import ADVANTAGE_ESTIMATORS, shape_rewards
from openrlhf.algorithms.preference_losses import PREFERENCE_LOSSES, Judged, Strength
from openrlhf.config import choices
from tests.config.commands import parse, ppo, violations
from tests.sources import ROOT


def example(about: str, file: Path) -> Path:
    """Find the page's code block that contains this word, and write the block to a file."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/extending.md").read_text(), re.DOTALL)
    (code,) = [block for block in blocks if about in block]
    file.write_text(code)
    return file


@pytest.fixture
def plugin(tmp_path: Path) -> Iterator[Path]:
    """Write the estimator's file, and unregister the estimator after the test."""
    yield example("advantage_estimator", tmp_path / "median.py")
    choices.ESTIMATORS.pop("median", None)
    ADVANTAGE_ESTIMATORS.pop("median", None)


def test_plugin_estimator_is_a_choice_with_the_same_checks_as_built_in_ones(plugin: Path) -> None:
    line = f"--plugin {plugin} --algo.advantage.estimator median"
    (sentence,) = violations("train_ppo_ray", line)
    assert "--algo.advantage.estimator median compares the samples of a prompt" in sentence
    config = ppo(f"{line} --rollout.n_samples_per_prompt 4")
    assert config.algo.advantage.gamma == 1.0


def test_plugin_estimator_uses_median_reward_of_prompt_as_baseline(plugin: Path) -> None:
    ppo(f"--plugin {plugin} --algo.advantage.estimator median --rollout.n_samples_per_prompt 3")
    rewards = torch.tensor([1.0, 5.0, 2.0, 9.0, 0.0, 0.0])
    groups = torch.tensor([7, 7, 7, 8, 8, 8])
    shaped = shape_rewards(rewards, groups, ADVANTAGE_ESTIMATORS["median"])
    assert shaped.tolist() == [-1.0, 3.0, 0.0, 9.0, 0.0, 0.0]


def test_plugin_preference_loss_is_a_flag_choice_and_computes_its_formula(tmp_path: Path) -> None:
    file = example("preference_loss", tmp_path / "exponential.py")
    try:
        config = parse("train_dpo", f"--plugin {file} --model.loss_type exponential --ref.offload")
        assert config.needs_reference and config.model.loss_type == "exponential"
        ours, theirs = (
            torch.tensor([[-1.0, -4.0], [-5.0, -2.0]]),
            torch.tensor([[-2.0, -3.0], [-5.0, -3.0]]),
        )
        judged = Judged(policy=ours, reference=theirs, tokens=torch.ones(2, 2))
        losses = PREFERENCE_LOSSES["exponential"](judged, Strength(beta=0.5))
        assert losses.tolist() == pytest.approx([math.exp(-1.0), math.exp(0.5)])
    finally:
        choices.PREFERENCE_LOSSES.pop("exponential", None)
        PREFERENCE_LOSSES.pop("exponential", None)
