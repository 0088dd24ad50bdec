"""Tests for the load-balancing loss of mixtures of experts, with packed and padded rows.

The loss is compared with Transformers' own.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from openrlhf.config.supervised import SFTConfig, SFTModelConfig
from openrlhf.core.batches import TokenRows
from openrlhf.models import packed_attention
from openrlhf.models.loading import ModelError, load_causal_lm
from openrlhf.models.policy import PolicyModel
from openrlhf.models.scalar import ScalarModel, load_scalar
from openrlhf.trainers.sft import SFTTask
from tests.loading import load_spec
from tests.models import test_scalar_model
from tests.models.test_scalar_model import LENGTHS
from tests.tiny import save_tiny_model, tiny_config, unbalance

KINDS = ["qwen3-moe", "mixtral"]


def batch() -> tuple[Tensor, Tensor]:
    """Return a batch of sequences, two of which have a common prefix.

    With packed rows the prefix is computed once but counted twice in the loss.
    """
    tokens, offsets = test_scalar_model.batch()
    tokens[6:10] = tokens[:4]
    return tokens, offsets


def mixture(kind: str, family: Any = AutoModelForCausalLM) -> Any:
    torch.manual_seed(0)
    hf = family.from_config(tiny_config(kind, num_labels=1)).float()
    unbalance(hf)
    return hf


def policy(hf: Any, *, packing: bool = True, balancing: bool = True) -> PolicyModel:
    hf = copy.deepcopy(hf)
    if packing:
        hf.set_attn_implementation(packed_attention.NAME)
    return PolicyModel(hf, packing=packing, balancing=balancing).train()


def aux_loss(model: nn.Module) -> Tensor:
    tokens, offsets = batch()
    wanted = (torch.ones_like(tokens, dtype=torch.bool),) if isinstance(model, PolicyModel) else ()
    loss = model(tokens, offsets, *wanted).aux_loss
    assert loss is not None
    return loss


def router_gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if name.endswith("gate.weight")}
    assert len(found) == 2 and all(gradient is not None for gradient in found.values())
    return {name: gradient for name, gradient in found.items() if gradient is not None}


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_load_balancing_loss_matches_transformers_on_unpadded_rows(
    kind: str, packing: bool
) -> None:
    hf = mixture(kind)
    tokens, _ = batch()
    rows = [hf(ids[None], output_router_logits=True).router_logits for ids in tokens.split(LENGTHS)]
    layers = tuple(torch.cat(layer) for layer in zip(*rows, strict=True))
    theirs = sys.modules[type(hf).__module__].load_balancing_loss_func(
        layers, layers[0].shape[1], top_k=2
    )
    assert aux_loss(policy(hf, packing=packing)).item() == pytest.approx(theirs.item(), abs=1e-6)
    assert theirs.item() > 2.5  # the loss of a balanced model is 2
    [row] = [ids for ids in tokens.split(LENGTHS) if len(ids) == max(LENGTHS)]
    alone = policy(hf, packing=packing)(
        row, torch.tensor([0, len(row)]), torch.ones_like(row, dtype=torch.bool)
    )
    assert alone.aux_loss.item() == pytest.approx(
        hf(row[None], output_router_logits=True).aux_loss.item(), abs=1e-6
    )


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_router_gets_a_load_balancing_gradient_with_and_without_checkpointing(
    kind: str, packing: bool
) -> None:
    gradients = []
    for checkpoints in (False, True):
        model = policy(mixture(kind), packing=packing)
        if checkpoints:
            model.hf.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        aux_loss(model).backward()
        gradients.append(router_gradients(model))
    for name, gradient in gradients[0].items():
        assert gradient.any(), name
        torch.testing.assert_close(gradients[1][name], gradient)


@pytest.mark.parametrize("kind", KINDS)
def test_scalar_model_and_policy_sharing_a_decoder_have_equal_load_balancing_losses(
    kind: str,
) -> None:
    hf = mixture(kind, AutoModelForSequenceClassification)
    model = ScalarModel(copy.deepcopy(hf), packing=False, balancing=True).train()
    causal = mixture(kind)
    causal.get_decoder().load_state_dict(hf.get_decoder().state_dict())
    loss = aux_loss(model)
    assert loss.item() == pytest.approx(aux_loss(policy(causal, packing=False)).item(), abs=1e-6)
    loss.backward()
    assert all(gradient.any() for gradient in router_gradients(model).values())


@pytest.mark.parametrize("asked", [True, False])
def test_router_logits_are_recorded_only_during_training_with_balancing(asked: bool) -> None:
    model = policy(mixture("mixtral"), balancing=asked).train(not asked)
    seen: list[Any] = []
    model.hf.get_decoder().register_forward_hook(
        lambda _, __, output: seen.append(output.get("router_logits"))
    )
    tokens, offsets = batch()
    assert model(tokens, offsets, torch.ones_like(tokens, dtype=torch.bool)).aux_loss is None
    assert seen == [None]


def task(coef: float) -> SFTTask:
    return SFTTask(SFTConfig(model=SFTModelConfig(aux_loss_coef=coef)))


def test_window_loss_is_the_target_weighted_mean_of_micro_batch_losses() -> None:
    """Three micro-batches have 4, 1 and 2 of the window's 7 targets.

    The loss without the load-balancing term does not depend on its coefficient.
    """
    model = policy(mixture("mixtral"))
    rows = [[7, 8, 9, 10, 11], [20, 21], [30, 31, 32, 33]]
    masks = [[False, *[True] * 4], [False, True], [False, False, True, True]]
    micros = [TokenRows.from_lists([r], [m]) for r, m in zip(rows, masks, strict=True)]

    def total(coef: float) -> float:
        return sum(task(coef).loss(model, micro, {"tokens": 7.0})[0].item() for micro in micros)

    losses = [
        model(micro.tokens, micro.offsets, micro.loss_mask).aux_loss.item() for micro in micros
    ]
    expected = 0.5 * (4 * losses[0] + losses[1] + 2 * losses[2]) / 7
    assert total(0.5) - total(0.0) == pytest.approx(expected, abs=1e-5)
    _, metrics = task(0.5).loss(model, micros[2], {"tokens": 7.0})
    assert metrics["train/aux_loss"].value == pytest.approx(losses[2])


def test_error_for_balancing_a_model_without_experts_names_the_flags_and_model(
    tmp_path: Path,
) -> None:
    path = save_tiny_model(tmp_path / "dense")
    spec = load_spec(path=path, param_dtype="fp32", attention="sdpa", packing=False)
    for load in (
        lambda: PolicyModel(load_causal_lm(spec), packing=False, balancing=True),
        lambda: load_scalar(spec, balancing=True),
    ):
        with pytest.raises(
            ModelError,
            match=r"dense \(qwen2\) has no experts.*--actor\.aux_loss_coef.*--model\.aux",
        ):
            load()
