"""Tests that the planner's copies of constants in other packages are up to date.

The planner copies the constants because importing the other packages would import torch.
"""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from openrlhf.algorithms import tensors
from openrlhf.config.optimizer import OptimizerConfig
from openrlhf.planning import activations, memory, rl_roles
from openrlhf.planning.constants import CPU
from openrlhf.planning.memory import RoleMemory
from openrlhf.planning.roles import ModelRole
from openrlhf.planning.shapes import shape_from_config
from openrlhf.rollout import engine_settings
from openrlhf.training import masters
from openrlhf.training.muon import Muon
from openrlhf.training.optimizers import make_optimizer
from openrlhf.workers import base
from tests.tiny import tiny_config


def test_planner_copies_of_constants_equal_the_originals() -> None:
    assert activations.CHUNK_LOGITS == tensors.CHUNK_LOGITS
    assert memory.BUCKET_BYTES == base.BUCKET_BYTES
    assert memory.SAMPLED_WEIGHTS == masters.MAX_SAMPLED_WEIGHTS
    assert rl_roles.CPU_CACHE_BYTES == engine_settings.CPU_KV_CACHE_BYTES


@pytest.mark.parametrize("lora", [0, 4, 64])
def test_state_of_8_bit_adam_has_the_predicted_size(lora: int) -> None:
    hf = AutoModelForCausalLM.from_config(tiny_config("llama-wide"))
    shape = shape_from_config(hf.config.to_dict())
    if lora:
        modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        hf = get_peft_model(hf, LoraConfig(r=lora, target_modules=modules))
    optimizer = make_optimizer(hf, OptimizerConfig(optim="adam_8bit"))
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    stored = 0
    for state in optimizer.state.values():
        for name in ("state1", "state2", "absmax1", "absmax2"):
            stored += state[name].nbytes if name in state else 0
    role = ModelRole(
        name="policy", shape=shape, dtype="fp32", trained=True, optimizer="adam_8bit",
        lora_rank=lora,
    )  # fmt: skip
    assert RoleMemory(role, CPU).moment_bytes == stored


class WithHead(nn.Module):
    """A model whose output layer is also in a module named `head`, as in `models.backbone`."""

    def __init__(self, hf: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.hf = hf
        self.head = nn.ModuleDict({"layer": head})


@pytest.mark.parametrize(
    ("kind", "lora"), [("llama-wide", 0), ("qwen2-tied", 0), ("qwen3", 0), ("llama-wide", 4)]
)
def test_state_of_muon_has_the_predicted_size(kind: str, lora: int) -> None:
    hf = AutoModelForCausalLM.from_config(tiny_config(kind))
    shape = shape_from_config(hf.config.to_dict())
    head = hf.get_output_embeddings()
    if lora:
        modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        hf = get_peft_model(hf, LoraConfig(r=lora, target_modules=modules, use_dora=True))
    optimizer = make_optimizer(WithHead(hf, head), OptimizerConfig(optim="muon"))
    assert isinstance(optimizer, Muon)
    optimizer.attach(optimizer, torch.device("cpu"))
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    stored = 0
    for state in optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            stored += state[name].nbytes if name in state else 0
    role = ModelRole(
        name="policy", shape=shape, dtype="fp32", trained=True, optimizer="muon",
        lora_rank=lora, dora=lora > 0,
    )  # fmt: skip
    assert RoleMemory(role, CPU).moment_bytes == stored
