"""A proof at the start of a run that the layout of a model's batches changes no number."""

import re
from collections.abc import Callable
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from openrlhf.batches import Layout, offsets_of
from openrlhf.models import packed_attention
from openrlhf.models.loading import ModelError, end_tokens
from openrlhf.models.policy import PolicyModel
from openrlhf.models.scalar import ScalarModel

Proven = PolicyModel | ScalarModel
LENGTHS = (11, 17)  # tokens of the two sequences
BEYOND = (
    16,
    32,
)  # tokens of the two long sequences, more than the model's attention reaches at once
LONGEST = 4096  # reach that is tried where the longest sequence of the run is not known
# Entries of a configuration that count tokens, or blocks of tokens, that attention keeps; and
# others that sound alike.
UNITS = re.compile("block|chunk|compress_rate")
KEPT = re.compile("window|topk|top_k")
OTHERS = re.compile(
    "expert|group|layer|moe|mlp|prob|pattern|method|num_|stage|step|mamba|rope|patch|conv"
)
GRADIENT_TOKENS = 1024  # in longer sequences only the numbers are compared, because a gradient would need their activations
LAYER_TYPES = (
    "layer_types",
    "layers_block_type",
    "block_types",
)  # of a configuration, where layers differ
ALIKE = 8  # tokens with which both begin, where packed rows compute a common beginning once
# Differences that rounding explains: of the numbers, mean in standard deviations; of the gradient,
# relative.
TOLERANCES = {torch.float32: (1e-3, 0.01), torch.float16: (0.05, 0.1), torch.bfloat16: (0.2, 0.5)}
UNPROVEN = "Not checked: whether the layout of the batches changes what the models compute. A run checks it first."
LEAK = 1e-5  # gradient by the tokens of another sequence, relative to the gradient by the sequence's own; correct is 0


def prove_layout(model: nn.Module) -> None:
    """Score two short sequences in the layout of the run, packed or padded, and each alone through
    plain Transformers.

    If the model's attention has windows, blocks, a top-k or compression of tokens that the run's
    sequences exceed, also score two sequences that exceed them. The log-probabilities or values and
    one gradient must agree, and no token may depend on another sequence. Raises ModelError, naming
    the layer types, if they do not agree. Weights, gradients, random state and mode stay unchanged.
    Collective under ZeRO 3, where a DeepSpeed engine may wrap the model. A model that is neither a
    PolicyModel nor a ScalarModel is not checked, because it lays out its batches itself.
    """
    model = getattr(model, "module", model)
    if not isinstance(model, Proven):
        return
    require_decoder(model)
    weights, training = next(model.parameters()), model.training
    texts: list[
        tuple[Tensor, tuple[int, ...], int]
    ] = []  # tokens, lengths, and the sequence that is compared
    for tokens in _texts(model):
        texts += [(tokens.to(weights.device), LENGTHS, place) for place in range(len(LENGTHS))]
    if reach := attention_reach(model.hf.config, model.max_len or LONGEST):
        lengths = tuple(min(reach + more, model.max_len or reach + more) for more in BEYOND)
        # A packed sequence may see the one before it, a padded one may see its padding.
        texts.append((_tokens(model, sum(lengths)).to(weights.device), lengths, int(model.packing)))
    with (
        torch.random.fork_rng(devices=[weights.device] if weights.is_cuda else []),
        torch.enable_grad(),
    ):
        try:
            model.eval()
            faults = [_fault(model, *text, weights.dtype) for text in texts]
        except packed_attention.UnsupportedAttentionError as error:
            raise ModelError(_refusal(model, f"cannot compute them: {error}")) from error
        except (
            AttributeError,
            ImportError,
            KeyError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            raise ModelError(
                _refusal(
                    model,
                    f"fails in its own code or in Transformers' ({type(error).__name__}: {error})",
                )
            ) from error
        finally:
            model.train(training)
    if found := [fault for fault in faults if fault]:
        raise ModelError(_refusal(model, found[-1]))


def require_decoder(model: Proven) -> None:
    """Raise ModelError unless the model's decoder is a separate Transformers module, below the
    output layer.

    Training reads hidden states from it, so that logits exist for a chunk of tokens at a time.
    """
    decoder: Any = model.hf.get_decoder()
    if isinstance(decoder, PreTrainedModel) and decoder is not model.hf:
        return
    raise ModelError(
        f"{model.hf.name_or_path or 'the model'}, of type {model.hf.config.model_type}, cannot be trained: below its "
        f"output layer, Transformers returns a {type(decoder).__name__} as the decoder. "
        "Use another architecture (Llama, Qwen, Mistral, …)."
    )


def attention_reach(config: PretrainedConfig, max_len: int) -> int:
    """Return the tokens that a sequence must exceed to use every window, block, top-k and
    compression that fits into `max_len`.

    0 if there are none beyond the short sequences. A top-k of blocks reaches as far as all its
    blocks.
    """
    counts: dict[str, list[int]] = {}
    for name, value in config.get_text_config().to_dict().items():
        if not OTHERS.search(name):
            values = (
                value.values()
                if isinstance(value, dict)
                else value
                if isinstance(value, list)
                else [value]
            )
            counts[name] = [count for count in values if type(count) is int and count > 0]
    units = [
        count
        for name in counts
        if UNITS.search(name) and not KEPT.search(name)
        for count in counts[name]
    ]
    kept = [count for name in counts if KEPT.search(name) for count in counts[name]]
    reaches = [*units, *kept, *(unit * count for unit in units for count in kept)]
    return max((reach for reach in reaches if sum(LENGTHS) < 2 * reach < 2 * max_len), default=0)


def _texts(model: Proven) -> list[Tensor]:
    """Two sequences; packed, also two that begin alike."""
    tokens = _tokens(model, sum(LENGTHS))
    alike = tokens.clone()
    alike[LENGTHS[0] :][:ALIKE] = alike[:ALIKE]
    return [tokens, alike] if model.packing else [tokens]


def _tokens(model: Proven, count: int) -> Tensor:
    """Tokens, none of which begins, ends or pads a sequence."""
    text = model.hf.config.get_text_config()
    drawn = torch.randperm(text.vocab_size, generator=torch.Generator().manual_seed(0)).tolist()
    marks = (*end_tokens(model.hf.config), text.pad_token_id, text.bos_token_id)
    ordinary = [token for token in drawn if token not in marks]
    return torch.tensor(list(islice(cycle(ordinary), count)))


def _fault(
    model: Proven, tokens: Tensor, lengths: tuple[int, ...], place: int, dtype: torch.dtype
) -> str | None:
    """The fault of one sequence in the layout of the run, as the end of a message; None if there is
    no fault.
    """
    offsets = offsets_of(lengths).to(tokens.device)
    own = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
    own[offsets[place] : offsets[place + 1]] = True
    if len(tokens) > GRADIENT_TOKENS:
        with torch.no_grad():
            numbers, expected = _laid_out(model, tokens, offsets)[own], _alone(model, tokens[own])
        return _gap_fault(
            numbers[-BEYOND[0] :], expected[-BEYOND[0] :], dtype
        )  # tokens beyond the model's reach
    expected, expected_gradient = _differentiated(model.hf, lambda: _alone(model, tokens[own]))
    # A forward for each sequence: ZeRO 3 knows no second backward of one forward.
    numbers, gradient = _differentiated(model.hf, lambda: _laid_out(model, tokens, offsets)[own])
    computed = own if model.packing else Layout.of(offsets).gather(own).flatten()
    mine, gradient = computed.nonzero()[:, 0], gradient.flatten(0, 1)
    if shared := model.shared_prefixes(tokens, offsets):
        mine = shared.source[own]
    leak = float(gradient.index_fill(0, mine, 0).norm() / gradient[mine].norm())
    gaps = (numbers - expected).abs()
    turned = float((gradient[mine] - expected_gradient[0]).norm() / expected_gradient.norm())
    if leak > LEAK:
        share = f"{leak:.1g} of its gradient; largest difference {gaps.max():.3g}"
        return f"mixes them: a token depends on other sequences ({share})"
    if fault := _gap_fault(numbers, expected, dtype):
        return fault
    if not turned <= TOLERANCES[dtype][1]:
        return f"computes a gradient that differs by {turned:.1%} from that of Transformers for each sequence alone"
    return None


def _gap_fault(numbers: Tensor, expected: Tensor, dtype: torch.dtype) -> str | None:
    gaps = (numbers - expected).abs()
    # Trained reward models may give nearly equal numbers far from 0, whose rounding exceeds their
    # deviation.
    rounding = 4 * torch.finfo(dtype).eps * float(expected.square().mean().sqrt())
    if not float(gaps.mean()) <= TOLERANCES[dtype][0] * float(expected.std()) + rounding:
        return f"computes other numbers than Transformers for each sequence alone (largest difference {gaps.max():.3g})"
    return None


def _differentiated(hf: PreTrainedModel, forward: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    """The numbers of a forward, and the gradient of their sum by the embeddings. No parameter gets
    a gradient.
    """
    leaves: list[Tensor] = []

    def cut(_: nn.Module, __: object, output: Tensor) -> Tensor:
        leaves.append(output.detach().requires_grad_())
        return leaves[-1].clone()  # some models scale embeddings in place, which a leaf forbids

    with hf.get_input_embeddings().register_forward_hook(cut):
        numbers = forward()
    return numbers.detach(), torch.autograd.grad(numbers.sum(), leaves[0])[0]


def _alone(model: Proven, sequence: Tensor) -> Tensor:
    """Numbers of one sequence alone, from the whole Transformers model without any code of ours."""
    outputs: list[
        Tensor
    ] = []  # of the last layer at every token: Transformers keeps one number of a scalar model

    def keep(_: nn.Module, __: object, output: Tensor) -> None:
        outputs.append(output)

    with packed_attention.unpacked(model.hf), model.head.layer.register_forward_hook(keep):
        logits = model.hf(input_ids=sequence[None], use_cache=False).logits
    if isinstance(model, ScalarModel):
        return outputs[0].reshape(-1).float()
    chunks = zip(logits[0, :-1].split(256), sequence[1:].split(256), strict=True)
    of_next = torch.cat(
        [rows.float().log_softmax(-1).gather(1, next[:, None])[:, 0] for rows, next in chunks]
    )
    return torch.cat([of_next.new_zeros(1), of_next])


def _laid_out(model: Proven, tokens: Tensor, offsets: Tensor) -> Tensor:
    """Numbers of both sequences in the layout of the run."""
    if isinstance(model, PolicyModel):
        return model(tokens, offsets, torch.ones_like(tokens, dtype=torch.bool)).logprobs
    values = model(tokens, offsets).values
    return values * model.std + model.mean if model.normalize else values


def _refusal(model: Proven, what: str) -> str:
    config = model.hf.config
    text: Any = config.get_text_config()
    kinds = next((each for name in LAYER_TYPES if (each := getattr(text, name, None))), ())
    layers = f" (layers: {', '.join(dict.fromkeys(kinds))})" if kinds else ""
    if model.packing:
        how, advice = "packed into one row", "Drop --ds.packing_samples"
    else:
        how, advice = "padded to one length", "Try --ds.packing_samples"
    return (
        f"{model.hf.name_or_path or 'the model'}, of type {config.model_type}{layers}, was given two sequences "
        f"{how}, and {what}. {advice}, or use another architecture."
    )
