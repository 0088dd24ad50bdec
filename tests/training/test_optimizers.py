"""Tests of optimizers, weight decay and the learning-rate schedule."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import get_scheduler

from openrlhf.config.optimizer import SCHEDULERS, AdamConfig, MuonConfig, OptimizerConfig
from openrlhf.training.optimizers import OPTIMIZERS, make_optimizer, make_schedule

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
    assert list(OPTIMIZERS) == ["adam", "muon"]


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
