"""Scores and outputs of the output layer, with and without an adapter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from openrlhf.algorithms import tensors
from openrlhf.core.batches import offsets_of
from openrlhf.models.head import OutputHead
from openrlhf.models.policy import PolicyModel
from tests.allocations import LargestTensor
from tests.tiny import tiny_config

ROWS, WIDTH, VOCABULARY = 48, 32, 1024


class Adapter(nn.Module):
    """A wrapper around a linear layer that computes y = W x + b + 2 · B A x.

    Like PEFT's adapters, the wrapper exposes the wrapped layer's weight.
    """

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.out_features = base, base.out_features
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2 * self.up(self.down(x))

    def merged(self) -> nn.Linear:
        layer = nn.Linear(self.base.in_features, self.out_features)
        layer.weight = nn.Parameter(
            (self.base.weight + 2 * self.up.weight @ self.down.weight).detach()
        )
        layer.bias = nn.Parameter(self.base.bias.detach())
        return layer


@pytest.fixture
def adapter() -> Adapter:
    torch.manual_seed(0)
    return Adapter(nn.Linear(WIDTH, VOCABULARY))


def inputs(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(rows, WIDTH, generator=draw), torch.randint(
        VOCABULARY, (rows,), generator=draw
    )


@pytest.mark.parametrize("rows", [ROWS, 0])
def test_adapted_head_matches_the_merged_layer_and_holds_one_chunk_of_logits(
    adapter: Adapter, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores and gradients match, and no tensor holds more logits than one chunk."""
    monkeypatch.setattr(tensors, "CHUNK_LOGITS", 4 * VOCABULARY)
    found = []
    for layer in (adapter, adapter.merged()):
        hidden, targets = inputs(rows)
        hidden.requires_grad_()
        with LargestTensor() as largest:
            logprobs, entropies = OutputHead(layer).scores(hidden, targets, 0.7, True)
            assert entropies is not None
            (logprobs.sum() + entropies.square().sum()).backward()
        assert hidden.grad is not None
        assert largest.numel <= WIDTH * VOCABULARY, "all logits would be 48 · 1024"
        found.append((logprobs, entropies, hidden.grad))
    for wrapped, merged in zip(*found, strict=True):
        torch.testing.assert_close(wrapped, merged, atol=1e-5, rtol=1e-5)
    assert adapter.up.weight.grad is not None and (rows == 0 or adapter.up.weight.grad.any())


@pytest.mark.parametrize("rows", [ROWS, 0])
@pytest.mark.parametrize("make", [lambda layer: layer, Adapter], ids=["plain", "adapted"])
def test_function_of_chunked_logits_matches_full_logits_and_holds_one_chunk(
    make: Callable[[nn.Linear], nn.Module], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results and gradients match those computed from all float64 logits at once."""
    torch.manual_seed(0)
    layer = make(nn.Linear(WIDTH, VOCABULARY)).double()
    hidden, targets = inputs(rows)
    hidden = hidden.double().requires_grad_()
    shares = torch.randn(rows, 2, dtype=torch.float64)

    def reduce(logits: Tensor, chunk: slice) -> Tensor:
        own = cross_entropy(logits, targets[chunk], reduction="none")
        return torch.stack([own, logits.logsumexp(1).square()], 1)

    inputs_of_gradients = [hidden, *layer.parameters()]
    whole = reduce(layer(hidden), slice(None))
    expected = torch.autograd.grad((whole * shares).sum(), inputs_of_gradients)
    monkeypatch.setattr(tensors, "CHUNK_LOGITS", 4 * VOCABULARY)
    with LargestTensor() as largest:
        reduced = OutputHead(layer).reduced(hidden, reduce)
        found = torch.autograd.grad((reduced * shares).sum(), inputs_of_gradients)
    assert largest.numel <= max(WIDTH, 4) * VOCABULARY, "all logits would be 48 · 1024"
    torch.testing.assert_close(reduced, whole)
    torch.testing.assert_close(found, expected)


def test_chunks_of_an_adapted_layer_run_no_forward_hooks(
    adapter: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeRO 3's hooks are collective, and ranks may have different numbers of chunks."""
    monkeypatch.setattr(tensors, "CHUNK_LOGITS", 4 * VOCABULARY)
    called: list[nn.Module] = []
    for module in adapter.modules():
        module.register_forward_hook(lambda module, *_: called.append(module))
        module.register_forward_pre_hook(lambda module, *_: called.append(module))
    hidden, targets = inputs()
    logprobs, _ = OutputHead(adapter).scores(hidden.requires_grad_(), targets)
    logprobs.sum().backward()
    assert called == []
    adapter(hidden)
    assert called, "the hooks are still there"


def test_policy_scores_include_the_adapter_of_the_output_layer() -> None:
    torch.manual_seed(0)
    hf = AutoModelForCausalLM.from_config(tiny_config("llama")).float()
    tokens, offsets = torch.arange(4, 20), offsets_of([7, 9])
    wanted = torch.ones(16, dtype=torch.bool)
    plain = PolicyModel(hf, packing=False)(tokens, offsets, wanted).logprobs
    hf.set_output_embeddings(Adapter(nn.Linear(32, 64)))
    hf.get_output_embeddings().base = hf.get_output_embeddings().merged()
    adapted = PolicyModel(hf, packing=False)(tokens, offsets, wanted).logprobs
    expected = (
        hf(tokens[None, :7]).logits[0].log_softmax(-1)[:-1].gather(1, tokens[1:7, None])[:, 0]
    )
    torch.testing.assert_close(adapted[1:7], expected)
    assert not torch.allclose(plain, adapted)


@pytest.mark.parametrize("make", [lambda layer: layer, Adapter], ids=["plain", "adapted"])
def test_outputs_of_a_bfloat16_head_are_float32(
    make: Callable[[nn.Linear], nn.Module],
) -> None:
    layer = make(nn.Linear(WIDTH, 8)).bfloat16()
    hidden, _ = inputs()
    logits = OutputHead(layer).outputs(hidden.bfloat16())
    assert logits.dtype == torch.float32
    assert torch.equal(logits, layer(hidden.bfloat16()).float())
