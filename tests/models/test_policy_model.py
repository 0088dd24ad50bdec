"""The policy model's outputs and gradients, compared with plain Transformers."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from openrlhf.algorithms import tensors
from openrlhf.core.batches import offsets_of
from openrlhf.models import packed_attention
from openrlhf.models.loading import reject_transformed_logits
from openrlhf.models.policy import PolicyModel
from openrlhf.models.shared_prefixes import SharedPrefixes
from tests.allocations import LargestTensor
from tests.second_device import DEVICE, SecondDevice, move
from tests.tiny import tiny_config

LENGTHS = [5, 1, 9, 3]


@pytest.fixture(params=["qwen2-tied", "qwen2-untied", "llama", "mistral-windowed", "qwen3"])
def hf(request: pytest.FixtureRequest) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny_config(request.param)).float().eval()


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(4, 60, (sum(LENGTHS),), generator=generator)
    wanted = torch.rand(sum(LENGTHS), generator=generator) < 0.7
    return tokens, offsets_of(LENGTHS), wanted


def as_model(hf: PreTrainedModel, *, packing: bool) -> PolicyModel:
    hf = copy.deepcopy(hf)
    if packing:
        hf.set_attn_implementation(packed_attention.NAME)
    return PolicyModel(hf, packing=packing)


def plain_logprobs(
    hf: PreTrainedModel, tokens: torch.Tensor, wanted: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Return log-probabilities computed from float64 logits, one sequence at a time."""
    scored, start = torch.zeros(len(tokens), dtype=torch.float64), 0
    for length in LENGTHS:
        ids = tokens[start : start + length]
        logits = hf(ids[None]).logits[0].double() / temperature
        for t in range(1, length):
            if wanted[start + t]:
                scored[start + t] = torch.log_softmax(logits[t - 1], -1)[ids[t]]
        start += length
    return scored


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_match_plain_transformers_on_each_sequence_alone(
    hf: PreTrainedModel, packing: bool, temperature: float
) -> None:
    tokens, offsets, wanted = batch()
    with torch.no_grad():
        scores = as_model(hf, packing=packing)(tokens, offsets, wanted, temperature)
        expected = plain_logprobs(hf, tokens, wanted, temperature)
    torch.testing.assert_close(scores.logprobs.double(), expected, atol=2e-6, rtol=0)
    assert expected.count_nonzero() > 5


def test_packed_and_padded_gradients_match(hf: PreTrainedModel) -> None:
    tokens, offsets, wanted = batch()
    gradients = []
    for packing in (False, True):
        model = as_model(hf, packing=packing)
        scores = model(tokens, offsets, wanted, 0.9, True)
        assert scores.entropy is not None
        (scores.logprobs.sum() + scores.entropy.square().sum()).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert any(g.abs().max() > 1e-3 for g in gradients[0].values())
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("packing", [False, True])
def test_batch_without_target_tokens_has_a_differentiable_zero_loss(packing: bool) -> None:
    model = as_model(AutoModelForCausalLM.from_config(tiny_config("qwen2-tied")), packing=packing)
    tokens, offsets, wanted = batch()
    model(tokens, offsets, torch.zeros_like(wanted)).logprobs.sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None and not parameter.grad.any()


@pytest.mark.parametrize("packing", [False, True])
def test_forward_and_backward_hold_only_one_chunk_of_logits(
    packing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output layer dominates memory with 160 tokens, width 32 and a vocabulary of 1024."""
    monkeypatch.setattr(tensors, "CHUNK_LOGITS", 4 * 1024)
    config = tiny_config("llama", vocab_size=1024)
    model = as_model(AutoModelForCausalLM.from_config(config).float(), packing=packing)
    tokens = torch.randint(4, 1000, (160,), generator=torch.Generator().manual_seed(0))
    with LargestTensor() as largest:
        scores = model(tokens, offsets_of([20] * 8), torch.ones(160, dtype=torch.bool), 0.7, True)
        assert scores.entropy is not None
        (scores.logprobs.sum() + scores.entropy.sum()).backward()
    assert largest.numel == 1024 * 32, "all logits would be 152 · 1024"


@pytest.mark.parametrize("checkpointing", [False, True])
def test_shared_prefix_is_computed_once_without_changing_the_results(
    hf: PreTrainedModel, checkpointing: bool
) -> None:
    """Pack two samples of a prompt, the prompt alone, and two copies of an unrelated sequence."""
    draw = torch.Generator().manual_seed(2)
    prompt, other, *ends = (
        torch.randint(4, 60, (length,), generator=draw) for length in (7, 6, 5, 9)
    )
    sequences = [torch.cat([prompt, ends[0]]), other, torch.cat([prompt, ends[1]]), prompt, other]
    tokens, offsets = torch.cat(sequences), offsets_of([len(sequence) for sequence in sequences])
    wanted = torch.rand(len(tokens), generator=draw) < 0.7
    seen, results = list[int](), list[tuple[torch.Tensor, ...]]()
    for packing in (False, True):
        model = as_model(hf, packing=packing).train()
        if checkpointing:
            model.hf.gradient_checkpointing_enable()
        model.hf.get_decoder().norm.register_forward_hook(
            lambda *call: seen.append(call[2].shape[:-1].numel())
        )
        scores = model(tokens, offsets, wanted, 0.9, True)
        assert scores.entropy is not None
        (scores.logprobs.square().sum() + scores.entropy.square().sum()).backward()
        gradients = (p.grad for p in model.parameters() if p.grad is not None)
        results.append((scores.logprobs.detach(), scores.entropy.detach(), *gradients))
    assert seen == [5 * 16, 7 + 5 + 9 + 6], (
        "padding computes all five rows; packing computes each distinct prefix once"
    )
    for padded, packed in zip(*results, strict=True):
        torch.testing.assert_close(packed, padded, atol=2e-5, rtol=1e-4)


def test_gradients_of_a_shared_prefix_in_bfloat16_are_rounded_once() -> None:
    samples = 64
    prefixes = SharedPrefixes.of(torch.tensor([5, 9] * samples), offsets_of([2] * samples))
    assert prefixes
    states = torch.zeros(1, 3, 2, 16, dtype=torch.bfloat16, requires_grad=True)
    expanded = prefixes.expand(states)
    gradient = torch.randn(expanded.shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    expanded.backward(gradient)
    assert states.grad is not None
    expected = gradient.double().unflatten(2, (samples, 2)).sum(2)
    torch.testing.assert_close(states.grad, expected.bfloat16(), rtol=0.004, atol=1e-6)


def test_short_shared_prefix_is_ignored() -> None:
    sequences = [[5, *range(10, 30)], [5, *range(31, 51)], [6, *range(10, 30)]]
    offsets = offsets_of([len(sequence) for sequence in sequences])
    assert SharedPrefixes.of(torch.tensor(sequences).flatten(), offsets) is None


def test_packed_documents_do_not_attend_to_each_other(hf: PreTrainedModel) -> None:
    model = as_model(hf, packing=True)
    tokens, offsets, wanted = batch()
    changed = tokens.clone()
    changed[: LENGTHS[0]] = tokens[: LENGTHS[0]].flip(0)
    with torch.no_grad():
        before, after = (
            model(tokens, offsets, wanted).logprobs,
            model(changed, offsets, wanted).logprobs,
        )
    assert torch.equal(before[LENGTHS[0] :], after[LENGTHS[0] :])
    assert not torch.equal(before, after)


@pytest.mark.parametrize("window", [None, 4])
def test_packed_attention_in_bfloat16_equals_float64_rounded_once(window: int | None) -> None:
    query, key, value = (torch.randn(1, heads, 16, 8).bfloat16() for heads in (4, 2, 2))
    options = {"document_lengths": [5, 11], "sliding_window": window}
    mixed, _ = packed_attention.packed_sdpa(torch.nn.Module(), query, key, value, None, **options)
    exact, _ = packed_attention.packed_sdpa(
        torch.nn.Module(), query.double(), key.double(), value.double(), None, **options
    )
    assert mixed.dtype == torch.bfloat16
    half_a_unit_in_the_last_place = 2**-8
    torch.testing.assert_close(mixed.double(), exact, rtol=half_a_unit_in_the_last_place, atol=1e-6)


def test_architecture_that_transforms_logits_is_rejected() -> None:
    config = tiny_config("llama")
    config.final_logit_softcapping = 30.0
    with pytest.raises(ValueError, match=r"final_logit_softcapping = 30\.0"):
        reject_transformed_logits(config)


@pytest.mark.parametrize("packing", [True, False])
def test_gpu_runs_the_decoder_and_the_head_without_waiting_for_the_cpu(
    packing: bool, hf: PreTrainedModel
) -> None:
    model = as_model(hf, packing=packing)
    reads: list[int] = []
    with SecondDevice() as device:
        move(model)
        decoder = model.hf.get_decoder()
        decoder.register_forward_hook(lambda *_: reads.append(len(device.reads)))
        model(*(column.to(DEVICE) for column in batch()), entropy=True)
        assert reads == [len(device.reads)]
