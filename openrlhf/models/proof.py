"""A start-up check that packing or padding batches does not change a model's outputs."""

import re
from collections.abc import Callable
from itertools import cycle, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from transformers import PretrainedConfig, PreTrainedModel

from openrlhf.checks import Finding
from openrlhf.core.batches import Layout, offsets_of
from openrlhf.models.backbone import Decoded
from openrlhf.models.loading import end_tokens
from openrlhf.models.packed_attention import UnsupportedAttentionError
from openrlhf.models.policy import PolicyModel
from openrlhf.models.probe import LogitGap, find_gap, plain_outputs
from openrlhf.models.ring_attention import RingRow
from openrlhf.models.scalar import ScalarModel

CheckedModel = PolicyModel | ScalarModel
# Names under which configurations store the dropout of attention scores.
ATTENTION_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
LENGTHS = (11, 17)  # lengths of the two short sequences, in tokens
# The two long sequences exceed the reach of the model's attention by this number of tokens.
TOKENS_BEYOND_REACH = (16, 32)
ASSUMED_MAX_LEN = 4096  # in tokens; used if the run's maximum sequence length is unknown
# Configuration keys for the size of a token block.
BLOCK_ENTRIES = re.compile("block|chunk|compress_rate")
# Configuration keys for the number of tokens or blocks kept by attention.
KEPT_ENTRIES = re.compile("window|topk|top_k")
# Configuration keys with similar names but different meanings.
OTHER_ENTRIES = re.compile(
    "expert|group|layer|moe|mlp|prob|pattern|method|num_|stage|step|mamba|rope|patch|conv"
)
# For longer inputs, only the outputs are compared, because a gradient would need all activations.
MAX_GRADIENT_TOKENS = 1024
# Length in tokens of the common prefix, which packed rows compute once.
PREFIX_TOKENS = 8
CHUNK_TOKENS = 256  # number of tokens whose logits are converted to float32 at a time
# Largest relative gradient differences that rounding explains.
GRADIENT_TOLERANCES = {torch.float32: 0.01, torch.float16: 0.1, torch.bfloat16: 0.5}
UNPROVEN = (
    "Not checked: whether packing or padding changes the models' outputs. A run checks this first."
)
# Largest gradient with respect to another sequence's tokens, which is 0 for a correct model.
# The unit is the gradient with respect to the sequence's own tokens.
LARGEST_LEAK = 1e-5


class _Case(NamedTuple):
    """Two sequences in one batch, and the index of the sequence to compare."""

    tokens: Tensor
    lengths: tuple[int, ...]
    compared: int


def prove_layout(model: nn.Module) -> list[Finding]:
    """Return a failure if packing or padding the run's batches changes a model's outputs.

    Scores two short sequences in the run's layout, packed or padded, and each sequence alone with
    plain Transformers. If the run's sequences are longer than the windows, blocks, top-k or token
    compression of the model's attention, two longer sequences are scored too. The log-probabilities
    or values and one gradient must agree, and no token may depend on another sequence. The failure
    names the model's layer types. Weights, gradients, RNG state and training mode stay unchanged.
    Under ZeRO 3, all ranks must call this function, and the model may be wrapped in a DeepSpeed
    engine. A model that is neither a PolicyModel nor a ScalarModel is not checked, because it lays
    out its own batches.
    """
    model = getattr(model, "module", model)
    if not isinstance(model, CheckedModel):
        return []
    decoder: Any = model.hf.get_decoder()
    if not isinstance(decoder, PreTrainedModel) or decoder is model.hf:
        # Read hidden states from the decoder, as training does.
        # Logits then exist for only one chunk of tokens at a time.
        seen = (
            f"{_name(model)}, cannot be trained: Transformers returns a {type(decoder).__name__} "
            "instead of a decoder that is separate from the output layer."
        )
        fix = "Use a different architecture (Llama, Qwen, Mistral, …)."
        return [Finding(seen, fix, fails=True)]
    for name in ATTENTION_DROPOUTS:
        dropout = getattr(model.hf.config.get_text_config(), name, None)
        if model.ring and dropout:
            seen = (
                f"{_name(model)}, has an attention dropout of {dropout}, which ring attention "
                "cannot apply."
            )
            fix = f"Use --ds.ring_attn_size 1, or set {name} to 0 in its config.json."
            return [Finding(seen, fix, fails=True)]
    was_training = model.training
    device = next(model.parameters()).device
    devices = [device] if device.type == "cuda" else []
    faults: list[str | None] = []
    with torch.random.fork_rng(devices=devices), torch.enable_grad():
        try:
            model.eval()
            for case in _cases(model, device):
                faults.append(_find_fault(model, case))
        except UnsupportedAttentionError as error:
            faults.append(str(error))
        except Exception as error:  # the model's own code may raise any type
            problem = f"its own code or Transformers failed ({type(error).__name__}: {error})"
            faults.append(problem)
        finally:
            model.train(was_training)
    return [_failure(model, fault) for fault in faults if fault][-1:]


def attention_reach(config: PretrainedConfig, max_len: int) -> int:
    """Return the largest attention reach below `max_len`, in tokens.

    A sequence longer than the reach exercises every window, block, top-k and token compression that
    fits into `max_len`. If attention keeps the top k blocks, its reach is k times the block size.
    Returns 0 if no reach exceeds the short sequences.
    """
    blocks: list[int] = []
    kept: list[int] = []
    for name, value in config.get_text_config().to_dict().items():
        if OTHER_ENTRIES.search(name):
            continue
        if KEPT_ENTRIES.search(name):
            kept += _positive_integers(value)
        elif BLOCK_ENTRIES.search(name):
            blocks += _positive_integers(value)
    reaches = blocks + kept
    for block in blocks:
        for count in kept:
            reaches.append(block * count)
    fitting = [reach for reach in reaches if sum(LENGTHS) < 2 * reach < 2 * max_len]
    return max(fitting, default=0)


def _positive_integers(value: Any) -> list[int]:
    values = [value]
    if isinstance(value, dict):
        values = list(value.values())
    elif isinstance(value, list):
        values = value
    return [count for count in values if type(count) is int and count > 0]


def _cases(model: CheckedModel, device: torch.device) -> list[_Case]:
    tokens = _ordinary_tokens(model, sum(LENGTHS)).to(device)
    with_prefix = tokens.clone()
    with_prefix[LENGTHS[0] :][:PREFIX_TOKENS] = with_prefix[:PREFIX_TOKENS]
    cases: list[_Case] = []
    for compared in range(len(LENGTHS)):
        cases.append(_Case(tokens, LENGTHS, compared))
        cases.append(_Case(with_prefix, LENGTHS, compared))
    max_len = model.max_len or ASSUMED_MAX_LEN
    reach = attention_reach(model.hf.config, max_len)
    if reach:
        lengths = tuple(min(reach + more, max_len) for more in TOKENS_BEYOND_REACH)
        tokens = _ordinary_tokens(model, sum(lengths)).to(device)
        # A packed sequence might attend to the preceding sequence.
        # A padded sequence might attend to its padding.
        cases.append(_Case(tokens, lengths, int(model.packing)))
    return cases


def _ordinary_tokens(model: CheckedModel, count: int) -> Tensor:
    """Return `count` tokens without the BOS, end-of-text and padding tokens."""
    text = model.hf.config.get_text_config()
    drawn = torch.randperm(text.vocab_size, generator=torch.Generator().manual_seed(0)).tolist()
    marks = (*end_tokens(model.hf.config), text.pad_token_id, text.bos_token_id)
    ordinary = [token for token in drawn if token not in marks]
    return torch.tensor(list(islice(cycle(ordinary), count)))


def _find_fault(model: CheckedModel, case: _Case) -> str | None:
    """Return a description of a wrong result in the run's layout, or None if all are correct."""
    tokens = case.tokens
    offsets = offsets_of(case.lengths).to(tokens.device)
    own = torch.zeros_like(tokens, dtype=torch.bool)
    own[offsets[case.compared] : offsets[case.compared + 1]] = True

    def score_in_layout() -> Tensor:
        return _score_in_layout(model, tokens, offsets)[own]

    def score_alone() -> Tensor:
        return _score_alone(model, tokens[own])

    if len(tokens) > MAX_GRADIENT_TOKENS:
        beyond_reach = slice(-TOKENS_BEYOND_REACH[0], None)
        with torch.no_grad():
            numbers, expected = score_in_layout()[beyond_reach], score_alone()[beyond_reach]
        return _describe(find_gap(expected, numbers, model.hf.dtype))
    # Each sequence gets a forward pass of its own.
    # ZeRO 3 supports only one backward pass per forward pass.
    expected, expected_gradient = _differentiate(model.hf, score_alone)
    numbers, gradient = _differentiate(model.hf, score_in_layout)
    gradient = gradient.flatten(0, 1)
    if model.ring:
        row = RingRow(model.ring, case.lengths)
        padded_length = row.num_tokens + row.padding
        places = row.places(tokens.device)
        part = Decoded(states=gradient, num_tokens=padded_length, ring=model.ring, places=places)
        gradient = part.column(gradient)[: len(tokens)]
    rows = torch.arange(len(tokens), device=tokens.device)
    if not model.packing:
        rows = Layout.of(offsets).real.flatten().nonzero()[:, 0]
    shared = model.shared_prefixes(tokens, offsets)
    if shared:
        rows = shared.source
    own_rows = rows[own]
    leak = float(gradient.index_fill(0, own_rows, 0).norm() / gradient[own_rows].norm())
    if leak > LARGEST_LEAK:
        return (
            f"mixed the sequences: a token depends on other sequences ({leak:.1g} of its gradient)"
        )
    error = (gradient[own_rows] - expected_gradient[0]).norm() / expected_gradient.norm()
    gap = find_gap(expected, numbers, model.hf.dtype)
    if not gap and not error <= GRADIENT_TOLERANCES[model.hf.dtype]:
        return (
            f"its gradient differs by {error:.1%} from the gradient that Transformers computes "
            "for each sequence alone"
        )
    return _describe(gap)


def _describe(gap: LogitGap | None) -> str | None:
    if gap:
        return f"its outputs and those of Transformers for each sequence alone are {gap.text}"
    return None


def _differentiate(hf: PreTrainedModel, forward: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    """Return a forward pass's outputs, and the gradient of their sum with respect to the
    embeddings.

    Parameters get no gradient.
    """
    leaves: list[Tensor] = []

    def cut(_: nn.Module, __: object, output: Tensor) -> Tensor:
        leaves.append(output.detach().requires_grad_())
        # Some models scale embeddings in place, which autograd forbids for a leaf.
        return leaves[-1].clone()

    with hf.get_input_embeddings().register_forward_hook(cut):
        numbers = forward()
    return numbers.detach(), torch.autograd.grad(numbers.sum(), leaves[0])[0]


def _score_alone(model: CheckedModel, sequence: Tensor) -> Tensor:
    """Return the outputs of plain Transformers for one sequence alone."""
    outputs = plain_outputs(model.hf, sequence)
    if isinstance(model, ScalarModel):
        return outputs.float()
    chunks = zip(outputs[:-1].split(CHUNK_TOKENS), sequence[1:].split(CHUNK_TOKENS), strict=True)
    losses = [cross_entropy(logits.float(), ids, reduction="none") for logits, ids in chunks]
    return pad(-torch.cat(losses), (1, 0))


def _score_in_layout(model: CheckedModel, tokens: Tensor, offsets: Tensor) -> Tensor:
    """Return the outputs for both sequences in the run's layout."""
    if isinstance(model, PolicyModel):
        return model(tokens, offsets, torch.ones_like(tokens, dtype=torch.bool)).logprobs
    values = model(tokens, offsets).values
    if model.normalize:
        values = values * model.std + model.mean
    return values


def _failure(model: CheckedModel, fault: str) -> Finding:
    layout = "padded to the same length"
    advice = "Try --ds.packing_samples"
    if model.packing:
        layout = "packed into one row"
        advice = "Drop --ds.packing_samples"
    if model.ring:
        layout = f"packed into one row shared by {model.ring.size} ranks"
        advice = "Use --ds.ring_attn_size 1"
    types = getattr(model.hf.config.get_text_config(), "layer_types", None)
    layers = f" (layers: {', '.join(dict.fromkeys(types))})" if types else ""
    return Finding(
        f"{_name(model)}{layers}, was given two sequences {layout}, and {fault}.",
        f"{advice}, or use a different architecture.",
        fails=True,
    )


def _name(model: CheckedModel) -> str:
    return f"{model.hf.name_or_path or 'the model'}, of type {model.hf.config.model_type}"
