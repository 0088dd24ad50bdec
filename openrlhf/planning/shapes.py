"""Names and shapes of a model's weights, from its config.json or the headers of its files."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from openrlhf.config.flags import UserError

EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*?)(\.weight)?")
LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
EMBEDDINGS = re.compile(r"(.*\.)?(embed_tokens|wte|wpe|embed_in|embed_positions)\.weight")
HEADS = re.compile(r"(lm_head|embed_out|score)\.weight")
VISION = re.compile(r"vision|multi_modal")  # weights that process images
# Causal masks and RoPE frequencies, which older files contain, but which are not parameters.
BUFFERS = re.compile(r"(.*\.)?(attn|attention)\.(masked_)?bias|.*\.inv_freq")

ATTENTION = "attention"  # parts of a decoder layer
MLP = "mlp"


class PlanError(UserError, ValueError):
    """Error for a model or cluster that cannot be planned."""


class SplitError(PlanError):
    """Error for a number of ranks that cannot share a model's attention heads equally."""


@dataclass(frozen=True)
class Weight:
    """A weight as loaded, with all experts of a layer stacked into one tensor."""

    name: str
    shape: tuple[int, ...]

    @cached_property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def layer(self) -> int | None:
        """The index of the weight's decoder layer, or None outside the decoder layers."""
        if VISION.search(self.name):
            return None
        found = LAYER.search(self.name)
        return int(found[1]) if found else None

    @property
    def is_expert(self) -> bool:
        """True for the stacked weights of a layer's experts."""
        return ".experts." in self.name

    @property
    def is_linear(self) -> bool:
        """True for matrices of linear layers in the decoder, to which adapters and NF4 apply."""
        is_router = self.name.endswith((".mlp.gate.weight", ".router.weight"))
        return len(self.shape) == 2 and self.layer is not None and not is_router

    @property
    def part(self) -> str:
        """The part of a decoder layer that the weight belongs to."""
        return ATTENTION if ".self_attn." in self.name else MLP

    @property
    def module(self) -> str:
        """The last part of the layer's name, for example q_proj."""
        return self.name.removesuffix(".weight").rpartition(".")[2]


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelShape:
    """A decoder model's sizes and all of its weights."""

    model_type: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int  # intermediate size of a dense layer or of one expert
    vocabulary: int
    tied: bool = False  # True if the output layer shares the embeddings' weight
    weights: tuple[Weight, ...] = ()
    experts: int = 0  # number of experts per layer; 0 if every layer is dense
    experts_per_token: int = 0
    shared_intermediate: int = 0  # intermediate size of the shared expert, which all tokens use
    qk_norm: bool = False
    norms_per_layer: int = 2
    windows: tuple[int | None, ...]  # sliding window of each layer, in tokens
    scalar: bool = False  # True if the output layer has one output
    stored_width: int = 4  # bytes per parameter in the model's files
    unsplit: tuple[str, ...] = ()  # parts of a layer that tensor parallelism does not split
    quantization: str = ""  # method by which the stored weights are quantized
    latent: int = 0  # cached elements per token and layer with latent attention (MLA)
    positions: int = 0  # number of positions for which the model was built; 0 if unknown

    @cached_property
    def parameters(self) -> int:
        """The number of parameters; tied weights count once."""
        return sum(weight.numel for weight in self.weights)

    @cached_property
    def largest_weight(self) -> int:
        """The number of elements in the largest weight."""
        return max(weight.numel for weight in self.weights)

    @cached_property
    def head_parameters(self) -> int:
        """The number of parameters in the output layer, whether or not it is tied."""
        if self.scalar:
            return self.hidden
        return self.hidden * self.vocabulary

    @cached_property
    def active_parameters(self) -> int:
        """The number of parameters that one text token uses, without the embeddings."""
        active = 0.0
        for weight in self.weights:
            share = 1.0
            is_lookup = EMBEDDINGS.fullmatch(weight.name) and not self.tied
            if weight.is_expert:
                share = self.experts_per_token / self.experts
            elif is_lookup or VISION.search(weight.name):
                share = 0.0
            active += weight.numel * share
        return round(active)

    def with_vision(self, headers: Mapping[str, Sequence[int]]) -> ModelShape:
        """Return this model with those stored weights that process images.

        Training holds these weights, but does not use them.
        """
        seeing: list[Weight] = []
        for stored, sizes in headers.items():
            if VISION.search(stored):
                seeing.append(Weight(stored, tuple(sizes)))
        return replace(self, weights=(*self.weights, *seeing))

    @property
    def queries(self) -> int:
        """The total width of the query heads."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """The total width of the key heads, which equals that of the value heads."""
        return self.kv_heads * self.head_dim

    def as_scalar(self) -> ModelShape:
        """Return this model with a scalar head, as in a reward model or a critic."""
        if self.scalar:
            return self
        body = [weight for weight in self.weights if not HEADS.fullmatch(weight.name)]
        head = Weight("score.weight", (1, self.hidden))
        return replace(self, weights=(*body, head), scalar=True, tied=False)


@dataclass(frozen=True, kw_only=True)
class Family:
    """Differences between an architecture's weights and Llama's."""

    qkv_bias: bool | None = None  # None if config.json decides (`attention_bias`)
    output_bias: bool | None = None
    qk_norm: str = ""  # "head": one norm per head; "all": one norm over all heads
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    fused: tuple[str, ...] = ()  # projections that share one matrix: "qkv", "gate_up"
    tied: bool = False  # default value of tie_word_embeddings
    head_dim: int | None = None  # default head_dim; None for hidden size ÷ heads
    mixture: bool = False
    expert_width: str = "intermediate_size"
    unsplit: tuple[str, ...] = ()  # parts of a layer that tensor parallelism does not split


GEMMA_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
GLM_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "post_self_attn_layernorm",
    "post_mlp_layernorm",
)
FAMILIES = {
    "llama": Family(),
    "mistral": Family(qkv_bias=False, output_bias=False),
    "qwen2": Family(qkv_bias=True, output_bias=False),
    "qwen3": Family(qk_norm="head", head_dim=128),
    "gemma": Family(tied=True, head_dim=256),
    "gemma2": Family(norms=GEMMA_NORMS, tied=True, head_dim=256),
    "gemma3_text": Family(norms=GEMMA_NORMS, qk_norm="head", tied=True, head_dim=256),
    "granite": Family(),
    "smollm3": Family(tied=True),
    "olmo2": Family(
        qk_norm="all",
        norms=("post_attention_layernorm", "post_feedforward_layernorm"),
        unsplit=(ATTENTION,),
    ),
    "phi3": Family(
        qkv_bias=False,
        output_bias=False,
        fused=("qkv", "gate_up"),
        unsplit=(ATTENTION, MLP),
    ),
    "glm4": Family(
        output_bias=False,
        norms=GLM_NORMS,
        fused=("gate_up",),
        head_dim=128,
        unsplit=(MLP,),
    ),
    "mixtral": Family(qkv_bias=False, output_bias=False, mixture=True),
    "qwen2_moe": Family(
        qkv_bias=True,
        output_bias=False,
        mixture=True,
        expert_width="moe_intermediate_size",
    ),
    "qwen3_moe": Family(
        qk_norm="head",
        mixture=True,
        expert_width="moe_intermediate_size",
    ),
}
# Architectures whose configurations may specify sliding layers by a period, not `layer_types`.
ALL_SLIDING = ("mistral", "mixtral")
WINDOW_PERIODS = {"gemma2": 2, "gemma3_text": 6}


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of config.json that describes the language model."""
    nested = config.get("text_config")
    if not isinstance(nested, Mapping):
        return config
    if "tie_word_embeddings" not in config:
        return nested
    return {"tie_word_embeddings": config["tie_word_embeddings"], **nested}


def shape_from_config(config: Mapping[str, Any], name: str = "") -> ModelShape:
    """Derive the shape of a model from its config.json, for known architectures.

    Raises PlanError if the architecture is unknown or a size is missing.
    """
    text = text_config(config)
    model_type = str(text.get("model_type", config.get("model_type", "")))
    family = FAMILIES.get(model_type)
    if family is None:
        raise PlanError(
            f"{name or 'config.json'}: the weights of architecture {model_type!r} are not known. "
            f"Known architectures: {', '.join(FAMILIES)}. For other architectures, use a folder "
            "that also has the safetensors files, whose headers list the weights."
        )
    is_scalar = "SequenceClassification" in str(config.get("architectures"))
    tied = bool(text.get("tie_word_embeddings", family.tied))
    shape = _without_weights(config, family, name)
    shape = replace(shape, tied=tied and not is_scalar, scalar=is_scalar)
    return replace(shape, weights=tuple(_weights(text, family, shape)))


def shape_from_headers(
    headers: Mapping[str, Sequence[int]], config: Mapping[str, Any], name: str = ""
) -> ModelShape:
    """Derive the shape of a model from the sizes of its stored weights, for any architecture.

    Raises PlanError if there are no weights, or if config.json lacks a size.
    """
    if not headers:
        raise PlanError(f"{name or 'The model'} has no weights in its safetensors files.")
    stacked: dict[str, tuple[int, ...]] = {}
    for stored, sizes in headers.items():
        if BUFFERS.fullmatch(stored) and len(sizes) != 1:
            continue
        found = EXPERT.fullmatch(stored)
        if found is None:
            stacked[stored] = tuple(sizes)
            continue
        together = f"{found[1]}.{found[3]}"
        count = stacked.get(together, (0,))[0] + 1
        stacked[together] = (count, *sizes)
    heads = [sizes[0] for weight, sizes in stacked.items() if HEADS.fullmatch(weight)]
    # A quantized model's scales have no sizes.
    experts = [sizes[0] for weight, sizes in stacked.items() if sizes and ".experts." in weight]
    family = Family(expert_width="moe_intermediate_size")
    return replace(
        _without_weights(config, family, name, experts=next(iter(experts), 0)),
        weights=tuple(Weight(stored, sizes) for stored, sizes in stacked.items()),
        qk_norm=any("q_norm" in weight for weight in stacked),
        tied=not heads,
        scalar=next(iter(heads), 0) == 1,
    )


def _stored_width(config: Mapping[str, Any]) -> int:
    """Return the number of bytes per parameter in the data type named by config.json."""
    text = text_config(config)
    named = [each.get(key) for each in (text, config) for key in ("dtype", "torch_dtype")]
    return 2 if "bfloat16" in named or "float16" in named else 4


def _without_weights(
    config: Mapping[str, Any], family: Family, name: str, *, experts: int = 0
) -> ModelShape:
    """Read the sizes of a model from config.json. Raises PlanError if a size is missing.

    `experts` is the number of experts, if known from the weights.
    """
    text = text_config(config)
    model_type = str(text.get("model_type", ""))
    size = partial(_size, text, name)
    hidden = size("hidden_size", "n_embd")
    heads = size("num_attention_heads", "n_head")
    layers = size("num_hidden_layers", "n_layer")
    if family.mixture:  # files of Transformers 4 and 5 use different keys
        experts = size("num_experts", "num_local_experts")
    width = dense = size("intermediate_size", "n_inner", default=4 * hidden)
    if experts:
        width = size(family.expert_width, default=dense)
    latent = size("kv_lora_rank", default=0)
    if latent:  # cached with the part of the key that has positions, for all heads together
        latent += size("qk_rope_head_dim", default=0)
    return ModelShape(
        model_type=model_type,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=size("num_key_value_heads", default=heads),
        head_dim=size("head_dim", default=family.head_dim or hidden // heads),
        intermediate=width,
        vocabulary=size("vocab_size"),
        experts=experts,
        experts_per_token=size("num_experts_per_tok", default=0),
        shared_intermediate=size("shared_expert_intermediate_size", default=0),
        qk_norm=bool(family.qk_norm),
        norms_per_layer=len(family.norms),
        windows=_windows(text, model_type, layers, size("sliding_window", default=0)),
        stored_width=_stored_width(config),
        unsplit=(MLP,) if experts else family.unsplit,
        quantization=(config.get("quantization_config") or {}).get("quant_method", ""),
        latent=latent,
        positions=size("max_position_embeddings", "n_positions", default=0),
    )


def _size(text: Mapping[str, Any], name: str, *keys: str, default: int | None = None) -> int:
    """Return the first size with one of these keys, or the default; without a default, a size is
    required.

    If an architecture has a size per layer, returns the largest. Raises PlanError for any other
    value than a number.
    """
    value = default
    for key in reversed(keys):
        value = text.get(key) or value
    if isinstance(value, list):
        value = max(value)
    if not isinstance(value, int) or value < 0:
        raise PlanError(
            f"The config.json of {name or 'the model'} has no usable {keys[0]} ({value!r}): a plan "
            "needs a positive whole number."
        )
    return value


def _has_experts(text: Mapping[str, Any], layer: int) -> bool:
    """Return whether this layer of a mixture-of-experts model has experts."""
    if layer in (text.get("mlp_only_layers") or ()):
        return False
    return (layer + 1) % int(text.get("decoder_sparse_step") or 1) == 0


def _weights(text: Mapping[str, Any], family: Family, shape: ModelShape) -> list[Weight]:
    hidden, vocabulary = shape.hidden, shape.vocabulary
    weights = [Weight("model.embed_tokens.weight", (vocabulary, hidden))]
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        weights += _attention(text, family, shape, f"{prefix}self_attn.")
        if shape.experts and _has_experts(text, layer):
            weights += _mixture(shape, f"{prefix}mlp.")
        else:
            width = _size(text, "", "intermediate_size", default=4 * hidden)
            weights += _mlp(text, family, hidden, width, f"{prefix}mlp.")
        weights += [Weight(f"{prefix}{norm}.weight", (hidden,)) for norm in family.norms]
    weights.append(Weight("model.norm.weight", (hidden,)))
    if shape.scalar:
        weights.append(Weight("score.weight", (1, hidden)))
    elif not shape.tied:
        weights.append(Weight("lm_head.weight", (vocabulary, hidden)))
    return weights


def _attention(
    text: Mapping[str, Any], family: Family, shape: ModelShape, prefix: str
) -> list[Weight]:
    hidden, queries, keys = shape.hidden, shape.queries, shape.keys
    by_config = bool(text.get("attention_bias", False))
    qkv_bias, output_bias = family.qkv_bias, family.output_bias
    if qkv_bias is None:
        qkv_bias = by_config
    if output_bias is None:
        output_bias = by_config
    outputs = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    if "qkv" in family.fused:
        outputs = {"qkv_proj": queries + 2 * keys}
    weights: list[Weight] = []
    for name, width in outputs.items():
        weights += _linear(prefix + name, width, hidden, bias=qkv_bias)
    weights += _linear(f"{prefix}o_proj", hidden, queries, bias=output_bias)
    if family.qk_norm:
        if family.qk_norm == "head":
            queries = keys = shape.head_dim
        weights.append(Weight(f"{prefix}q_norm.weight", (queries,)))
        weights.append(Weight(f"{prefix}k_norm.weight", (keys,)))
    return weights


def _mlp(
    text: Mapping[str, Any], family: Family, hidden: int, width: int, prefix: str
) -> list[Weight]:
    has_bias = bool(text.get("mlp_bias", False))
    outputs = {"gate_proj": width, "up_proj": width}
    if "gate_up" in family.fused:
        outputs = {"gate_up_proj": 2 * width}
    weights: list[Weight] = []
    for name, size in outputs.items():
        weights += _linear(prefix + name, size, hidden, bias=has_bias)
    return weights + _linear(f"{prefix}down_proj", hidden, width, bias=has_bias)


def _linear(name: str, outputs: int, inputs: int, *, bias: bool) -> list[Weight]:
    """Return the matrix of a linear layer, and the bias if the layer has one."""
    weights = [Weight(f"{name}.weight", (outputs, inputs))]
    if bias:
        weights.append(Weight(f"{name}.bias", (outputs,)))
    return weights


def _mixture(shape: ModelShape, prefix: str) -> list[Weight]:
    hidden, experts, width = shape.hidden, shape.experts, shape.intermediate
    weights = [
        Weight(f"{prefix}gate.weight", (experts, hidden)),
        Weight(f"{prefix}experts.gate_up_proj", (experts, 2 * width, hidden)),
        Weight(f"{prefix}experts.down_proj", (experts, hidden, width)),
    ]
    shared = shape.shared_intermediate
    if shared:
        weights += _mlp({}, Family(), hidden, shared, f"{prefix}shared_expert.")
        weights.append(Weight(f"{prefix}shared_expert_gate.weight", (1, hidden)))
    return weights


def _windows(
    text: Mapping[str, Any], model_type: str, layers: int, window: int
) -> tuple[int | None, ...]:
    """Return each layer's sliding window in tokens, or None for a layer with full attention."""
    if not window or text.get("use_sliding_window") is False:
        return (None,) * layers
    kinds = text.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == layers:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if kinds:
        raise PlanError(f"The layer_types in config.json must list {layers} layers, not {kinds!r}.")
    if model_type in ALL_SLIDING:
        return (window,) * layers
    period = int(text.get("sliding_window_pattern") or WINDOW_PERIODS.get(model_type, 1))
    return tuple(window if (layer + 1) % period else None for layer in range(layers))
