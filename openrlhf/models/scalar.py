"""Reward models and critics: a language model's decoder under a head with one output per token.

The head is linear. The models are stored in Transformers' format for sequence classification with
one label, so that `AutoModelForSequenceClassification` loads them.
"""

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from openrlhf.models import loading
from openrlhf.models.backbone import HeadedModel, Outputs
from openrlhf.models.head import OutputHead
from openrlhf.models.loading import LoadSpec, ModelError, configuration, end_tokens
from openrlhf.models.weights import StoredWeights, require_finite
from openrlhf.reporting import notice

NATIVE_HEAD = "score"  # Transformers' name for the head


class ScalarModel(HeadedModel):
    """A model that returns one value for every prefix of every sequence.

    A reward model uses the last value, and a critic uses all values. With `normalize`, the values
    are (value − mean) / std, using the statistics that reward model training stored in the
    configuration. Reward model training itself does not normalize.
    """

    def __init__(
        self,
        hf: PreTrainedModel,
        *,
        packing: bool,
        normalize: bool = False,
        balancing: bool = False,
    ) -> None:
        stored = hf.config.to_dict()
        layer = hf.get_submodule(stored.get("value_head_prefix") or NATIVE_HEAD)
        head = OutputHead(layer, precise=True)
        super().__init__(hf, head, packing=packing, balancing=balancing)
        self.normalize = normalize
        self.mean, self.std = _scale(stored.get("mean", 0.0), stored.get("std", 1.0))

    def set_scale(self, mean: float, std: float) -> None:
        """Set the mean and standard deviation used by `normalize` and stored in exports.

        Raises ModelError if a value is not finite, or if `std` is not positive.
        """
        self.mean, self.std = _scale(mean, std)
        self.config.update({"mean": self.mean, "std": self.std})

    def forward(self, tokens: Int[Tensor, " N"], offsets: Int[Tensor, " B+1"]) -> Outputs:
        """Return the float32 value of each prefix of each sequence, at the prefix's last token."""
        decoded = self.decode(tokens, offsets)
        values = decoded.column(self.head.outputs(decoded.states)[:, 0])
        if self.normalize:
            values = (values - self.mean) / self.std
        return Outputs(values, decoded.aux_loss)


def last_token_scores(
    values: Float[Tensor, " N"], offsets: Int[Tensor, " B+1"]
) -> Float[Tensor, " B"]:
    """Return the reward of each sequence: the head's output at its last token.

    Sequences must not be empty.
    """
    return values[offsets[1:] - 1]


def state_values(values: Float[Tensor, " N"], offsets: Int[Tensor, " B+1"]) -> Float[Tensor, " N"]:
    """Return V of the state before each token, computed from the head's outputs after each token.

    Position t gets the output at t − 1. The first position of each sequence has no preceding state
    and gets 0.

    Example with two sequences: outputs [1, 2, 3 | 4, 5] become [0, 1, 2 | 0, 4].
    """
    later = torch.ones_like(values, dtype=torch.bool)
    later[offsets[:-1]] = False
    places = later.nonzero()[:, 0]
    return torch.zeros_like(values).index_put((places,), values[places - 1])


def load_scalar(
    spec: LoadSpec,
    *,
    head_prefix: str = NATIVE_HEAD,
    reinit_head: bool = False,
    require_head: bool = False,
    normalize: bool = False,
    balancing: bool = False,
    seed: int = 0,
) -> ScalarModel:
    """Load a scalar model, or a causal language model with a new head.

    `head_prefix` is the name of the head, unless the stored configuration has a
    `value_head_prefix`. Only this function can load an export whose head is not named "score".
    `reinit_head` replaces a stored head with a new one. `require_head` rejects a folder without a
    head, because its rewards would be random. A new head is drawn from N(0, σ²) with σ = 1 /
    (hidden size + 1). A new head depends only on `seed`, so all ranks get the same head. A new head
    resets the stored mean and standard deviation. Raises ModelError if the model cannot be loaded.
    """
    config, declared = _configuration(spec, head_prefix)
    model_class = _model_class(config)
    hf, weights = loading.read_model(
        model_class, spec, config=config, **loading.pretrained_options(spec)
    )
    name = config.value_head_prefix
    head = hf._modules.get(name)
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise ModelError(_unsupported(config))
    stored = _check_weights(
        weights, name, reinit_head=reinit_head, require_head=require_head or declared
    )
    require_finite(hf, spec.path)
    if reinit_head or not stored:
        setattr(hf, name, _new_head(head, seed))
        if "mean" in hf.config.to_dict():
            hf.config.update({"mean": 0.0, "std": 1.0})
    hf = loading.prepare_model(hf, spec, head=name)
    model = ScalarModel(
        hf, packing=spec.ds.packing_samples, normalize=normalize, balancing=balancing
    )
    model.max_len = spec.max_len
    return model


def check_is_scalar(
    spec: LoadSpec, *, head_prefix: str = NATIVE_HEAD, normalize: bool = False
) -> None:
    """Raise ModelError unless the folder contains a complete reward model.

    With `normalize`, prints a notice if its configuration has no mean and standard deviation. Reads
    only the names and sizes of the weights.
    """
    config, declared = _configuration(spec, head_prefix)
    architectures = config.architectures or []
    if not declared and any(name.endswith("ForCausalLM") for name in architectures):
        raise ModelError(
            f"{spec.path} is a language model ({architectures[0]}). Use a reward model, such as "
            "one trained by train_rm."
        )
    if normalize and "std" not in config.to_dict():
        notice(
            f"--reward.normalize_enable changes nothing for {spec.path}, which has no stored mean "
            "and standard deviation of its rewards. Its rewards are used as they are. train_rm "
            "stores both."
        )
    check_scalar_weights(spec, head_prefix=head_prefix, require_head=True)


def check_scalar_weights(
    spec: LoadSpec,
    *,
    head_prefix: str = NATIVE_HEAD,
    reinit_head: bool = False,
    require_head: bool = False,
) -> None:
    """Raise the error that `load_scalar` would raise for the stored weights' names and sizes."""
    config, declared = _configuration(spec, head_prefix)
    weights = loading.named_weights(_model_class(config), spec, config=config)
    if weights:
        _check_weights(
            weights,
            config.value_head_prefix,
            reinit_head=reinit_head,
            require_head=require_head or declared,
        )


def _configuration(spec: LoadSpec, head_prefix: str) -> tuple[Any, bool]:
    """Return the stored configuration, converted to the configuration of a scalar model.

    The second returned value is True if the stored configuration already described a scalar model.
    """
    config = configuration(spec)
    stored_prefix = config.to_dict().get("value_head_prefix")
    names = config.architectures or []
    declared = bool(stored_prefix) or any("SequenceClassification" in name for name in names)
    config.num_labels = 1
    config.value_head_prefix = stored_prefix or head_prefix
    text = config.get_text_config()
    if text.pad_token_id in end_tokens(config):
        # Transformers reads the score at the last non-padding token.
        # If end-of-text were the padding token, the score would be read one token too early.
        text.pad_token_id = None
    return config, declared


def _model_class(config: Any) -> Any:
    """Return Transformers' class for the architecture, with the configured name for the head."""
    native: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    if native is None:
        raise ModelError(_unsupported(config))
    name = config.value_head_prefix
    if name == NATIVE_HEAD:
        return native
    if not name.isidentifier() or hasattr(native, name) or name == native.base_model_prefix:
        raise ModelError(
            f"the scalar head cannot be called {name!r}: set --ds.value_head_prefix to an unused "
            "name such as score"
        )

    def build(self: Any, config: PretrainedConfig) -> None:
        native.__init__(self, config)
        self._modules[name] = self._modules.pop(NATIVE_HEAD, None)

    head = property(lambda self: self.get_submodule(name))  # for Transformers' own forward
    body = {"__init__": build, "__module__": native.__module__, NATIVE_HEAD: head}
    return type(native.__name__, (native,), body)


def _unsupported(config: PretrainedConfig) -> str:
    return (
        f"{config.model_type!r} cannot be used for reward models and critics, which are stored as "
        "sequence classification models: Transformers has none with a plain linear head for this "
        "architecture. Use a different architecture (Llama, Qwen, Mistral, Gemma, …)."
    )


def _check_weights(
    weights: StoredWeights, name: str, *, reinit_head: bool, require_head: bool
) -> bool:
    """Return whether the folder contains the head `name`.

    Raises ModelError for weights that are missing, have the wrong size, or would be ignored, such
    as a head's bias.
    """
    key = f"{name}.weight"
    exceptions = [key]
    if reinit_head:
        exceptions.append(f"{name}.bias")
    weights.require_all(but=exceptions)
    has_head = key not in weights.lacking
    if require_head and not has_head and not reinit_head:
        problem = "is missing"
        if key in weights.sizes:
            problem = f"has size {weights.sizes[key][0]} instead of one output"
        unused = ", ".join(weights.unused[:3]) or "none"
        raise ModelError(
            f"{weights.path} is not a reward model or critic: its scalar head, {key}, {problem} "
            f"(unused weights: {unused}). Use a trained model, or correct --ds.value_head_prefix. "
            "To train a new head, use train_rm with --model.reinit_head."
        )
    return has_head


def _new_head(old: nn.Linear, seed: int) -> nn.Linear:
    """Return a float32 head with outputs near 0.

    The head is a new module, which ZeRO 3 shards when the engine is created.
    """
    head = nn.Linear(old.in_features, 1, bias=False, dtype=torch.float32)
    draw = torch.Generator().manual_seed(seed)
    nn.init.normal_(head.weight, std=1 / (old.in_features + 1), generator=draw)
    return head


def _scale(mean: float, std: float) -> tuple[float, float]:
    if not (math.isfinite(mean) and math.isfinite(std) and std > 0):
        raise ModelError(
            f"rewards cannot be normalized with mean {mean} and standard deviation {std}: both "
            "must be finite, and the standard deviation must be positive"
        )
    return float(mean), float(std)
