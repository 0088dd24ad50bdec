"""PPO on ranks that share sequences or layers gives the same numbers as in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from openrlhf.observability.run_folder import read_lines
from tests.e2e.commands import finish, launch, small_grpo
from tests.tiny import HEADS, save_reward_model, save_tiny_model

COMPARED = (
    "train/score",
    "train/kl",
    "train/policy_loss",
    "train/critic_loss",
    "train/values",
    "train/entropy_loss",
    "train/actor_grad_norm",
    "train/critic_grad_norm",
)
ROUNDING = 1e-5


@pytest.fixture(scope="module")
def workspace(own_folder: Path) -> Path:
    sizes = {**HEADS, "num_key_value_heads": 2}
    save_tiny_model(own_folder / "model", "llama", **sizes)
    save_tiny_model(own_folder / "critic", "llama", seed=3, **sizes)
    save_reward_model(own_folder / "rewards", own_folder / "critic")
    lines = [json.dumps({"input": f"{number}+{number % 7}="}) + "\n" for number in range(8)]
    (own_folder / "prompts.jsonl").write_text("".join(lines))
    return own_folder


def steps_of(workspace: Path, name: str, **flags: Any) -> list[dict[str, Any]]:
    """Run PPO with a critic, a reference and a reward model, and return the logged steps."""
    folder = workspace / name
    run = small_grpo(workspace, folder, prompts=4, samples=2) | {
        "critic.model_name_or_path": workspace / "critic",
        "reward.model_name_or_path": workspace / "rewards",
        "algo.advantage.estimator": "gae",
        "algo.kl.init_coef": 0.01,
        "actor.adam.lr": 1e-3,
        "actor.entropy_coef": 0.001,
        "ds.packing_samples": True,
        "train.colocate_all": True,
        **flags,
    }
    finished = finish(launch("train_ppo_ray", run))
    assert finished.status == 0, finished.errors[-4000:]
    return [line for line in read_lines(folder / "metrics.jsonl") if "train/score" in line]


@pytest.fixture(scope="module")
def one_process(workspace: Path) -> list[dict[str, Any]]:
    return steps_of(workspace, "one")


@pytest.mark.parametrize(
    "flag",
    ["ds.ring_attn_size", pytest.param("ds.tensor_parallel_size", marks=pytest.mark.verify)],
)
def test_ppo_on_ranks_that_share_work_equals_one_process(
    workspace: Path, one_process: list[dict[str, Any]], flag: str
) -> None:
    steps = steps_of(workspace, flag, **{flag: 2})
    assert len(steps) == len(one_process) == 2
    for found, expected in zip(steps, one_process, strict=True):
        for name in COMPARED:
            assert found[name] == pytest.approx(expected[name], abs=ROUNDING), name
        assert found["train/logprob_gap_max"] < 1e-4  # the engines have the trained weights
