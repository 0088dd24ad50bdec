"""PPO on ranks that share sequences or layers gives the same numbers as PPO in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from openrlhf.observability.run_folder import read_lines
from tests.e2e.commands import finish, launch, numbers, small_grpo, write_rows
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
    sizes: dict[str, Any] = {**HEADS, "num_key_value_heads": 2}
    save_tiny_model(own_folder / "model", "llama", **sizes)
    save_tiny_model(own_folder / "critic", "llama", seed=3, **sizes)
    save_reward_model(own_folder / "rewards", own_folder / "critic")
    lines = [json.dumps({"input": f"{number}+{number % 7}="}) + "\n" for number in range(8)]
    (own_folder / "prompts.jsonl").write_text("".join(lines))
    return own_folder


def steps_of(workspace: Path, folder: Path, **flags: Any) -> list[dict[str, Any]]:
    """Run PPO with a critic, a reference and a reward model, and return the logged steps."""
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
    return steps_of(workspace, workspace / "one")


RING, SPLIT = {"ds.ring_attn_size": 2}, {"ds.tensor_parallel_size": 2}


def check_same(steps: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Check that two runs logged equal numbers up to rounding and sampled with current weights."""
    assert len(steps) == len(expected) == 2
    for found, alone in zip(steps, expected, strict=True):
        for name in COMPARED:
            assert found[name] == pytest.approx(alone[name], abs=ROUNDING), name
        assert found["train/logprob_gap_max"] < 1e-4  # the engines sampled with the trained weights


@pytest.mark.parametrize(
    "layout",
    [
        RING,
        pytest.param(SPLIT, marks=pytest.mark.verify),
        pytest.param(RING | SPLIT, marks=pytest.mark.verify),
        pytest.param(RING | SPLIT | {"ds.zero_stage": 3}, marks=pytest.mark.verify),
    ],
    ids=["ring", "split", "ring and split", "ring and split, ZeRO 3"],
)
def test_ppo_on_ranks_that_share_work_gives_the_same_numbers_as_one_process(
    workspace: Path,
    tmp_path: Path,
    one_process: list[dict[str, Any]],
    layout: dict[str, Any],
) -> None:
    check_same(steps_of(workspace, tmp_path / "run", **layout), one_process)


@pytest.mark.verify
@pytest.mark.parametrize("published", ["adapter", "merged"])
def test_adapters_trained_on_ranks_that_share_work_equal_adapters_from_one_process(
    workspace: Path, tmp_path: Path, published: str
) -> None:
    flags = {"ds.lora.rank": 4, "ds.lora.alpha": 16, "ds.lora.publish": published}
    alone = steps_of(workspace, tmp_path / "one", **flags)
    adapters = load_file(tmp_path / "one/model/adapter_model.safetensors")
    for name, layout in {"split": SPLIT, "ring and split": RING | SPLIT}.items():
        check_same(steps_of(workspace, tmp_path / name, **flags, **layout), alone)
        found = load_file(tmp_path / name / "model/adapter_model.safetensors")
        assert set(found) == set(adapters)
        for tensor, weight in adapters.items():
            torch.testing.assert_close(found[tensor], weight, atol=1e-3, rtol=0, msg=tensor)


AGENT = """
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class Environment(AgentInstanceBase):
    async def step(self, states, **kwargs):
        return {
            "rewards": 0.1 + len(states["action_text"]) % 8 / 10,
            "environment_feedback": " again: ",
            "done": states["turn"] == 1,
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(Environment)
"""


@pytest.mark.verify
def test_published_asynchronous_agent_command_trains_with_ring_attention(
    workspace: Path, tmp_path: Path
) -> None:
    """The flags are those of the published command line, except for the model, data and sizes."""
    (tmp_path / "agent.py").write_text(AGENT)
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    sizes: dict[str, Any] = {**HEADS, "num_key_value_heads": 2, "max_position_embeddings": 1024}
    save_tiny_model(tmp_path / "model", "qwen3", chat_template=template, **sizes)
    # Groups whose samples have equal rewards are dropped, so there are more prompts than needed.
    prompts = [{"prompt": "guess a digit: ", "label": str(number % 10)} for number in range(24)]
    flags = {
        "pretrain": tmp_path / "model",
        "load_checkpoint": True,
        "save_path": tmp_path / "export",
        "ckpt_path": tmp_path / "checkpoints",
        "save_hf_ckpt": True,
        "max_ckpt_num": 3,
        "save_steps": 2,
        "agent_func_path": tmp_path / "agent.py",
        "prompt_data": write_rows(tmp_path / "prompts.jsonl", prompts),
        "input_key": "prompt",
        "label_key": "label",
        "prompt_max_len": 32,
        "generate_max_len": 64,
        "apply_chat_template": True,
        "packing_samples": True,
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 8,
        "train_batch_size": 32,
        "dynamic_filtering": True,
        "dynamic_filtering_reward_range": [0.0, 1.0],
        "use_dynamic_batch": True,
        "train_max_tokens_per_gpu": 64,
        "rollout_max_tokens_per_gpu": 128,
        "micro_train_batch_size": 1,
        "micro_rollout_batch_size": 8,
        "max_samples": 24,
        "max_epochs": 1,
        "num_episodes": 1,
        "async_train": True,
        "ref_num_nodes": 1,
        "ref_num_gpus_per_node": 4,
        "actor_num_nodes": 1,
        "actor_num_gpus_per_node": 4,
        "vllm_num_engines": 2,
        "vllm_tensor_parallel_size": 1,
        "vllm_gpu_memory_utilization": 0.7,
        "colocate_all_models": True,
        "deepspeed_enable_sleep": True,
        "vllm_sync_backend": "nccl",
        "enforce_eager": True,
        "zero_stage": 3,
        "gradient_checkpointing": True,
        "ring_attn_size": 2,
        "ring_head_stride": 2,
        "param_dtype": "bf16",
        "advantage_estimator": "reinforce_baseline",
        "actor_learning_rate": 5e-7,
        "entropy_loss_coef": 0.0,
        "init_kl_coef": 1e-5,
        "use_kl_loss": True,
        "kl_estimator": "k2",
        "enable_vllm_is_correction": True,
        "vllm_is_correction_type": "icepop",
        "use_tensorboard": tmp_path / "tensorboard",
        "logging_steps": 1,
        "eval_steps": -1,
        "run.dir": tmp_path / "run",
    }
    finished = finish(launch("train_ppo_ray", flags))
    assert finished.status == 0, finished.errors[-4000:]
    steps = [line for line in numbers(tmp_path / "run") if "train/score" in line]
    assert len(steps) >= 4 and max(step["train/logprob_gap_mean"] for step in steps) < 0.02
