"""Tests for optimizers, weight decay and the learning-rate schedule."""

from __future__ import annotations

import copy

import pytest
import torch
from bitsandbytes.optim.adamw import AdamW8bit
from torch import nn
from transformers import get_scheduler

from openrlhf.config.optimizer import SCHEDULERS, AdamConfig, MuonConfig, OptimizerConfig
from openrlhf.training.adam_8bit import Adam8bit
from openrlhf.training.optimizers import (
    OPTIMIZERS,
    MovableState,
    make_optimizer,
    make_schedule,
    match_step_counters,
    repeat_steps,
)

ADAM = AdamConfig(lr=0.5, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1)


def model() -> nn.Module:
    layers = nn.ModuleDict(
        {"dense": nn.Linear(2, 3), "norm": nn.LayerNorm(3), "frozen": nn.Linear(1, 1)}
    )
    layers["frozen"].requires_grad_(False)
    return layers


def test_weight_decay_applies_to_matrices_but_not_to_biases_and_norms() -> None:
    optimizer = make_optimizer(model(), OptimizerConfig(adam=ADAM))
    groups = [
        (group["weight_decay"], [tuple(p.shape) for p in group["params"]])
        for group in optimizer.param_groups
    ]
    assert groups == [(0.1, [(3, 2)]), (0.0, [(3,), (3,), (3,)])]
    assert all(
        (g["lr"], g["betas"], g["eps"]) == (0.5, (0.8, 0.9), 1e-3) for g in optimizer.param_groups
    )


def test_unregistered_optimizer_error_lists_the_registered_names() -> None:
    with pytest.raises(ValueError, match=r"optimizer 'lion'.* adam"):
        make_optimizer(model(), OptimizerConfig(optim="lion"))
    assert list(OPTIMIZERS) == ["adam", "muon", "adam_8bit"]


class TinyModel(nn.Module):
    """A model with every kind of parameter, and a head that is also reachable by another name."""

    def __init__(self) -> None:
        super().__init__()
        self.hf = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(7, 2),
                "dense": nn.Linear(2, 3),
                "norm": nn.LayerNorm(3),
                "conv": nn.Conv1d(3, 3, 2, bias=False),
                "score": nn.Linear(3, 1, bias=False),
            }
        )
        self.hf["experts"] = nn.Module()
        self.hf["experts"].register_parameter("stack", nn.Parameter(torch.zeros(4, 3, 2)))
        self.head = nn.ModuleDict({"layer": self.hf["score"]})


def test_muon_trains_only_the_matrices_of_hidden_layers() -> None:
    settings = OptimizerConfig(
        optim="muon",
        adam=ADAM,
        muon=MuonConfig(lr=0.25, momentum=0.5, ns_steps=3, nesterov=False),
    )
    module = TinyModel()
    names = {parameter: name for name, parameter in module.named_parameters()}
    matrices, decayed, undecayed = make_optimizer(module, settings).param_groups
    assert [names[p] for p in matrices["params"]] == ["hf.dense.weight", "hf.experts.stack"]
    assert [names[p] for p in decayed["params"]] == [
        "hf.embed_tokens.weight",
        "hf.conv.weight",
        "hf.score.weight",
    ]
    assert [names[p] for p in undecayed["params"]] == [
        "hf.dense.bias",
        "hf.norm.weight",
        "hf.norm.bias",
    ]
    assert [group["lr"] for group in (matrices, decayed, undecayed)] == [0.25, 0.5, 0.5]
    assert [group["weight_decay"] for group in (matrices, decayed, undecayed)] == [0.1, 0.1, 0.0]
    assert (matrices["momentum"], matrices["iterations"], matrices["nesterov"]) == (0.5, 3, False)


def test_only_large_weights_outside_embeddings_have_8_bit_moments() -> None:
    module = nn.ModuleDict(
        {
            "embed_tokens": nn.Embedding(64, 64),
            "large": nn.Linear(64, 64),
            "small": nn.Linear(64, 63, bias=False),
            "norm": nn.LayerNorm(4096),
        }
    )
    names = {parameter: name for name, parameter in module.named_parameters()}
    settings = OptimizerConfig(optim="adam_8bit", adam=ADAM)
    optimizer = make_optimizer(module, settings)
    groups = [
        (group["is_8bit"], group["weight_decay"], [names[p] for p in group["params"]])
        for group in optimizer.param_groups
    ]
    assert groups == [
        (True, 0.1, ["large.weight"]),
        (False, 0.1, ["embed_tokens.weight", "small.weight"]),
        (False, 0.0, ["large.bias", "norm.weight", "norm.bias"]),
    ]
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for parameter, state in optimizer.state.items():
        expected = torch.uint8 if names[parameter] == "large.weight" else torch.float32
        assert (state["state1"].dtype, state["state2"].dtype) == (expected, expected)


@pytest.mark.parametrize("size", [256, 1000, 2**20 + 300])
@pytest.mark.parametrize("bits", [8, 32])
def test_8_bit_adam_computes_long_tensors_in_chunks(size: int, bits: int) -> None:
    """A chunk must have the moments and scales of its own weights."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(size, generator=generator)
    gradients = [torch.randn(size, generator=generator) for _ in range(3)]
    one, other = nn.Parameter(weights.clone()), nn.Parameter(weights.clone())
    settings = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.1}
    ours = Adam8bit([{"params": [one], "is_8bit": bits == 8}], **settings)
    theirs = AdamW8bit([other], min_8bit_size=0 if bits == 8 else size + 1, **settings)
    for gradient in gradients:
        one.grad, other.grad = gradient.clone(), gradient.clone()
        ours.step()
        theirs.step()
    assert torch.equal(one, other)
    assert list(ours.state) == [one]


def test_8_bit_adam_moves_its_entire_state() -> None:
    weight = nn.Parameter(torch.ones(4096))
    optimizer = Adam8bit([{"params": [weight], "is_8bit": True}])
    weight.grad = torch.ones(4096)
    optimizer.step()
    assert isinstance(optimizer, MovableState)
    optimizer.move_state(torch.device("meta"))
    moved = [v.device.type for v in optimizer.state[weight].values() if torch.is_tensor(v)]
    assert moved == ["meta"] * 6


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("steps", [2, 7, 40])
def test_schedule_matches_transformers_over_the_steps_of_the_run(name: str, steps: int) -> None:
    settings = OptimizerConfig(lr_scheduler=name, lr_warmup_ratio=0.11, min_lr_ratio=0.2)
    ours, theirs = (make_optimizer(model(), settings) for _ in range(2))
    least = {"min_lr_rate": 0.2} if "min_lr" in name else {}
    if name == "warmup_stable_decay":
        least = {"min_lr_ratio": 0.2, "num_decay_steps": -(-steps // 10)}
    expected = get_scheduler(
        name, theirs, -(-11 * steps // 100), steps, scheduler_specific_kwargs=least
    )
    schedule = make_schedule(ours, settings, steps)
    for _ in range(steps):
        assert schedule.get_last_lr() == expected.get_last_lr()
        for optimizer, scheduler in ((ours, schedule), (theirs, expected)):
            optimizer.step()
            scheduler.step()


@pytest.mark.parametrize("name", SCHEDULERS)
def test_run_with_a_single_step_has_a_positive_learning_rate(name: str) -> None:
    """With a warmup, the run's only step would have a learning rate of 0."""
    settings = OptimizerConfig(lr_scheduler=name, adam=ADAM)
    optimizer = make_optimizer(model(), settings)
    assert min(make_schedule(optimizer, settings, 1).get_last_lr()) > 0


def test_fused_adam_resumes_from_state_with_integer_step_counters() -> None:
    weights = [nn.Parameter(torch.zeros(3))]
    optimizer = torch.optim.AdamW(weights, fused=True)
    moments = {"exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}
    optimizer.state[weights[0]] = {"step": 5, **moments}
    match_step_counters(optimizer)
    weights[0].grad = torch.ones(3)
    optimizer.step()
    assert optimizer.state[weights[0]]["step"].item() == 6


@pytest.mark.parametrize("steps", [0, 1, 2, 6, 20])
def test_adam_on_the_cpu_resumes_bit_for_bit(steps: int) -> None:
    def take_step(layer: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        for parameter in layer.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()

    torch.manual_seed(0)
    running = nn.Linear(100, 100)
    settings = OptimizerConfig(adam=AdamConfig(lr=1e-3, betas=(0.9, 0.95)))
    optimizer = make_optimizer(running, settings, offload=True)
    for number in range(steps):
        take_step(running, optimizer, number)
    resumed = copy.deepcopy(running)
    fresh = make_optimizer(resumed, settings, offload=True)
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    repeat_steps(fresh)
    assert hasattr(fresh, "ds_opt_adam"), "DeepSpeedCPUAdam could not be compiled"
    for number in range(steps, steps + 3):
        take_step(running, optimizer, number)
        take_step(resumed, fresh, number)
    assert torch.equal(resumed.weight, running.weight)
    assert torch.equal(resumed.bias, running.bias)
