"""Loads Transformers models with the dtype, attention and adapters from the flags."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as transformers_logging

from openrlhf.config.commands import ModelCommand
from openrlhf.config.shared import DeepSpeedConfig, LoadingConfig, LoraConfig, TrainedModelConfig
from openrlhf.layer_plan import split_patterns
from openrlhf.models import packed_attention
from openrlhf.models.adapters import adapter_targets, add_adapters, unadapted_experts
from openrlhf.models.checkpointing import checkpoint_layers
from openrlhf.models.weights import ModelError, StoredWeights, odd_experts, require_finite
from openrlhf.reporting import notice

# Configuration keys for logit transformations that some architectures apply.
LOGIT_TRANSFORMS = (
    "final_logit_softcapping",
    "logits_soft_cap",
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
)
# The config.json key with a process reward model's placeholder and reward tokens.
STEP_TOKENS = "process_reward"
STEP_TOKENS_EXAMPLE = (
    r'{"process_reward": {"placeholder_token": "\n", "reward_tokens": ["+", "-"]}}'
)
SHOWN_FILES = 8  # in a message
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

transformers_logging.disable_progress_bar()  # a progress bar per process and model would flood logs


@dataclass(frozen=True, kw_only=True)
class LoadSpec:
    """The settings for loading one model, built from the flags."""

    path: str
    ds: LoadingConfig  # resolved settings, including the attention implementation actually used
    max_len: int | None = None  # number of tokens in the run's longest sequence
    training: TrainedModelConfig | None = None  # settings of gradient checkpointing
    trust_remote_code: bool = False
    lora: LoraConfig | None = None  # new adapters are added if its rank is above 0
    seed: int = 0  # random seed of new adapters
    spread: bool = False  # whether to spread the layers over this process's GPUs, if it has any

    @classmethod
    def of(cls, config: ModelCommand, path: str) -> Self:
        """Return the settings for one of this command's models.

        Attention, precision and packing are the same for all models of a command.
        """
        return cls(
            path=path,
            ds=config.ds,
            max_len=config.data.max_len,
            trust_remote_code=config.model.trust_remote_code,
        )

    def trained(self, model: TrainedModelConfig, lora: LoraConfig, seed: int) -> Self:
        """Return the settings for training the same model, with adapters if `lora` has a rank."""
        return replace(self, training=model, lora=lora, seed=seed)


def load_causal_lm(spec: LoadSpec) -> PreTrainedModel:
    """Load a causal language model, ready to train.

    Raises ModelError for unreadable or incomplete files, and for any model rejected by
    `check_is_causal`.
    """
    check_is_causal(spec)
    model, stored = read_model(AutoModelForCausalLM, spec, **pretrained_options(spec))
    stored.require_all()
    require_finite(model, spec.path)
    return prepare_model(model, spec)


def check_causal_lm(spec: LoadSpec) -> None:
    """Raise ModelError as `load_causal_lm` would, except for weights that are NaN or infinite.

    Prints notices. Reads only the names and sizes of the weights, so that a run can check a model
    before it starts any process.
    """
    check_is_causal(spec)
    stored = named_weights(AutoModelForCausalLM, spec)
    if stored:
        stored.require_all()


def named_weights(model_class: Any, spec: LoadSpec, **more: Any) -> StoredWeights | None:
    """Compare names and sizes of the stored weights with the architecture.

    Prints notices about unused weights, and about experts without adapters. Returns None for a
    quantized model, because only its own loader can match the names of its weights.
    """
    config = configuration(spec)
    if getattr(config, "quantization_config", None):
        if isinstance(spec.ds, DeepSpeedConfig):  # other commands may leave the model to an engine
            reject_quantized(spec, config)
        return None
    model, stored = read_model(
        model_class, spec, device_map="meta", trust_remote_code=spec.trust_remote_code, **more
    )
    if stored.notice:
        notice(stored.notice)
    if spec.training and spec.training.aux_loss_coef:
        require_balanced_experts(model)
    if spec.lora and spec.lora.rank:
        adapter_targets(model, spec.lora.target_modules, spec.path)
        unadapted = unadapted_experts(model, spec.path)
        if unadapted:
            notice(unadapted)
    return stored


def read_model(
    model_class: Any, spec: LoadSpec, **options: Any
) -> tuple[PreTrainedModel, StoredWeights]:
    """Load a model, and compare its files with its architecture.

    All models of this package are loaded by this function.
    """
    # cuDNN's attention takes about 80 ms on an H100 to build a plan for each new batch shape.
    # Nearly every batch has a new shape.
    torch.backends.cuda.enable_cudnn_sdp(False)
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # `StoredWeights` reports missing and unused weights
    try:
        with explaining_failures(spec):
            model, report = model_class.from_pretrained(
                spec.path,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # `StoredWeights` rejects them
                **options,
            )
    finally:
        transformers_logging.set_verbosity(level)
    unround_rope(model)
    return model, StoredWeights.of(spec.path, model, report)


def configuration(spec: LoadSpec) -> Any:
    """Return the stored configuration.

    Raises ModelError for unreadable files, if --data.max_len exceeds the positions of a model
    without RoPE, and if dynamic RoPE would make frequencies depend on the batch. Raises UserError
    if tensor parallelism cannot split the layers.
    """
    if os.path.isdir(spec.path) and not os.path.exists(os.path.join(spec.path, "config.json")):
        files = ", ".join(sorted(os.listdir(spec.path))[:SHOWN_FILES]) or "none"
        raise ModelError(
            f"{spec.path} has no config.json, so it is not a model in Transformers' format. Its "
            f"files: {files}. Use a different folder, or convert the model: Transformers has "
            "scripts for other libraries' formats."
        )
    with explaining_failures(spec):
        config = AutoConfig.from_pretrained(spec.path, trust_remote_code=spec.trust_remote_code)
    _check_positions(spec, config, kinds=["none"])  # a table of positions has no further rows
    kind, positions = _rope(config)
    if kind == "dynamic" and spec.max_len and positions and spec.max_len > positions:
        raise ModelError(
            f"{spec.path} has rope_type dynamic: beyond {positions} tokens, its outputs depend on "
            f"the longest sequence in a batch. --data.max_len is {spec.max_len}: lower it to "
            f"{positions}."
        )
    if isinstance(spec.ds, DeepSpeedConfig) and spec.ds.tensor_parallel_size > 1:
        split_patterns(config, spec.ds.tensor_parallel_size)
    return config


def _rope(config: Any) -> tuple[str, int | None]:
    """Return the type of RoPE scaling, and the number of positions.

    The type is `default` for no scaling and `none` without RoPE. If layer types have different
    scalings, `dynamic` takes precedence.
    """
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    # The parameters of the entire model, or one entry per layer type.
    parameters = getattr(text, "rope_parameters", None) or {}
    if not parameters:
        return "none", positions
    entries = [entry for entry in (parameters, *parameters.values()) if isinstance(entry, dict)]
    scalings = {entry.get("rope_type", "default") for entry in entries} - {"default"}
    scaling = min(scalings, default="default")  # "dynamic" sorts first
    return scaling, positions


def end_tokens(config: Any) -> list[int]:
    """Return the model's end-of-text tokens according to its stored configuration."""
    ends = config.get_text_config().eos_token_id
    if ends is None:
        return []
    if isinstance(ends, list):
        return ends
    return [ends]


def check_is_causal(spec: LoadSpec) -> None:
    """Raise ModelError unless the configuration describes a fully supported causal LM.

    Reads no weights, so that the check is fast at startup.
    """
    config = configuration(spec)
    for name in config.architectures or []:
        if "SequenceClassification" in name:
            raise ModelError(
                f"{spec.path} is a reward model or critic ({name}). Use a language model."
            )
    loaded: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    own_code = spec.trust_remote_code and getattr(config, "auto_map", None)
    if loaded is not None and not own_code and not isinstance(config, loaded.config_class):
        stored = ", ".join(config.architectures or [config.model_type])
        raise ModelError(
            f"{spec.path} is not a text-only model ({stored}). Transformers would load only its "
            "language model, and an export would lose the other parts. Use a text-only model."
        )
    reject_transformed_logits(config)


def step_tokens(spec: LoadSpec) -> tuple[str, list[str]]:
    """Return a process reward model's placeholder, and its tokens for correct and incorrect steps.

    Raises ModelError if the model's config.json does not name these tokens.
    """
    check_is_causal(spec)
    stored = getattr(configuration(spec), STEP_TOKENS, None) or {}
    placeholder = stored.get("placeholder_token")
    judgements = stored.get("reward_tokens") or []
    if not placeholder or len(judgements) < 2:
        raise ModelError(
            f"{spec.path} does not name its placeholder and reward tokens. Train it with train_prm "
            "and --prm.reward_tokens (the token for a correct step first), or add the tokens to "
            f"its config.json, for example {STEP_TOKENS_EXAMPLE}."
        )
    return placeholder, judgements


def reject_transformed_logits(architecture: PretrainedConfig) -> None:
    """Raise ModelError for an architecture that transforms logits after the output layer.

    This package would compute wrong log-probabilities for such an architecture.
    """
    for name in LOGIT_TRANSFORMS:
        value = getattr(architecture.get_text_config(), name, None)
        if value not in (None, 1, 1.0):
            raise ModelError(
                f"{architecture.model_type} transforms its logits after the output layer "
                f"(config.{name} = {value}); such models are not supported. Use an architecture "
                "with a plain output layer (Llama, Qwen, Mistral, …)."
            )


def has_balanced_experts(hf: PreTrainedModel) -> bool:
    """Return whether Transformers has a load-balancing loss for the model's experts."""
    known = hasattr(sys.modules[type(hf).__module__], "load_balancing_loss_func")
    return known and hasattr(hf.config.get_text_config(), "num_experts_per_tok")


def require_balanced_experts(hf: PreTrainedModel) -> None:
    """Raise ModelError unless Transformers has a load-balancing loss for the model's experts."""
    if not has_balanced_experts(hf):
        raise ModelError(
            f"{hf.name_or_path} ({hf.config.model_type}) has no experts with a known "
            "load-balancing loss. Drop --actor.aux_loss_coef (in RL) or --model.aux_loss_coef "
            "(elsewhere)"
        )


def reject_quantized(spec: LoadSpec, config: Any) -> None:
    """Raise ModelError for a model that is stored quantized, except in 4 bits for QLoRA."""
    stored = getattr(config, "quantization_config", None) or {}
    method = stored.get("quant_method")
    if not method:
        return
    in_4bit = method == "bitsandbytes" and stored.get("load_in_4bit")
    if in_4bit and spec.ds.load_in_4bit:
        return
    advice = "Use the unquantized model."
    if in_4bit:
        advice = "Add --ds.load_in_4bit and --ds.lora.rank, or use the unquantized model."
    raise ModelError(
        f"{spec.path} is stored quantized ({method}), which this command does not support. {advice}"
    )


def check_positions(spec: LoadSpec) -> None:
    """Raise ModelError if --data.max_len exceeds the model's positions and RoPE is not scaled."""
    _check_positions(spec, configuration(spec), kinds=("none", "default"))


def _check_positions(spec: LoadSpec, config: Any, *, kinds: Sequence[str]) -> None:
    """Raise ModelError if --data.max_len exceeds the positions of a model with such a RoPE."""
    kind, positions = _rope(config)
    if spec.max_len and positions and spec.max_len > positions and kind in kinds:
        raise ModelError(
            f"--data.max_len is {spec.max_len}, but {spec.path} has {positions} positions. "
            "Lower --data.max_len."
        )


def pretrained_options(spec: LoadSpec) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that are common to all models.

    Raises ModelError for a model that is stored quantized.
    """
    reject_quantized(spec, configuration(spec))
    dtype = DTYPES[spec.ds.param_dtype]
    attention = spec.ds.attn_implementation
    if spec.ds.packing_samples and attention == "sdpa":
        attention = packed_attention.NAME
    return {
        "dtype": dtype,
        "attn_implementation": attention,
        "trust_remote_code": spec.trust_remote_code,
        "device_map": "auto" if spec.spread and torch.cuda.is_available() else None,
        "quantization_config": qlora(dtype) if spec.ds.load_in_4bit else None,
    }


def qlora(dtype: torch.dtype) -> BitsAndBytesConfig:
    """Return the settings for NF4 with double quantization and computation in `dtype`.

    Dettmers et al. 2023, arXiv:2305.14314
    """
    nf4: dict[str, Any] = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=dtype, **nf4)


@contextmanager
def explaining_failures(spec: LoadSpec) -> Iterator[None]:
    """Convert Transformers' errors from loading a model to ModelErrors until the block exits.

    The error message names the file or flag at fault.
    """
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        # Transformers, its validation code and the model's own code raise many types of errors.
        raise ModelError(f"the model {spec.path} {_explain(error, spec)}") from error


def _explain(error: Exception, spec: LoadSpec) -> str:
    """Return a description of the error, to be appended to the model's path in a message."""
    if isinstance(error, OSError | SafetensorError):
        if os.path.isdir(spec.path):
            return f"cannot be read (possibly an incomplete download): {error}"
        return f"is not a local folder and could not be fetched from the Hub: {error}"
    if "trust_remote_code" in str(error):
        return "contains its own code: if you trust the code, add --model.trust_remote_code"
    if "attention implementation" in str(error) or packed_attention.NAME in str(error):
        advice = "try --ds.attn_implementation eager"
        if spec.ds.packing_samples:
            # Eager attention handles packed rows correctly in only a few architectures.
            # In other architectures, it seems to be correct, but only for short texts.
            advice = "drop --ds.packing_samples"
        return f"does not support {spec.ds.attn_implementation} attention: {advice}. {error}"
    if isinstance(error, StrictDataclassError):  # a configuration that contradicts itself
        return f"has an invalid config.json: {error}"
    if isinstance(error, ImportError | KeyError | ValueError):
        # For example, a package that is not installed or an unknown architecture.
        return f"cannot be loaded: {error}"
    # If Transformers fails to stack a layer's experts, its error does not name an expert.
    odd = odd_experts(spec.path)
    if odd:
        return f"has weights that do not match its config.json: {odd}. Download or export it again."
    return (
        f"cannot be built from its config.json and weights ({type(error).__name__}: {error}). "
        "Download or export the model again, or correct config.json."
    )


def prepare_model(
    model: PreTrainedModel, spec: LoadSpec, *, head: str | None = None
) -> PreTrainedModel:
    """Fix the RoPE frequencies, and add adapters and gradient checkpointing if the spec asks for
    them.

    `head` names a scalar model's head, which is trained alongside adapters.
    """
    if spec.max_len:
        pin_longrope(model, spec.max_len)
    if spec.ds.load_in_4bit:
        for layer in model.modules():
            # Prevent the first evaluation on a CPU from packing the weights:
            # kernels for packed weights have no backward pass.
            layer.support_avx512bf16_for_cpu = False  # pyright: ignore[reportArgumentType]
    if spec.lora and spec.lora.rank:
        add_adapters(model, spec.lora, path=spec.path, seed=spec.seed, head=head)
        # without this call, a layer whose inputs require no gradient would get no gradient
        if spec.training and spec.training.gradient_checkpointing_reentrant:
            model.enable_input_require_grads()
    if spec.training and spec.training.gradient_checkpointing_enable:
        checkpoint_layers(model, spec.training)
    return model


def unround_rope(model: PreTrainedModel) -> None:
    """Recompute RoPE frequencies that are not in float32.

    While Transformers builds a model under ZeRO 3, DeepSpeed casts new tensors to the data type of
    the weights, including the exponents of the frequencies. The model is changed in place.
    """
    for module in model.modules():
        for name, frequencies in list(module.named_buffers(recurse=False)):
            if name.endswith("inv_freq") and frequencies.dtype != torch.float32:
                module.register_buffer(name, frequencies.float(), persistent=False)
                model._init_weights(module)


def pin_longrope(model: PreTrainedModel, max_len: int) -> None:
    """Give all sequences the RoPE frequencies for `max_len` tokens, as the engine does.

    LongRoPE has two sets of frequencies, and Transformers chooses a set for the longest sequence in
    each batch. Without this function, a result would therefore depend on the other sequences in the
    batch. The model is changed in place.
    """
    for module in model.modules():
        if getattr(module, "rope_type", None) == "longrope":
            rotary: Any = module
            frequencies, rotary.attention_scaling = ROPE_INIT_FUNCTIONS["longrope"](
                rotary.config, device=rotary.inv_freq.device, seq_len=max_len
            )
            rotary.register_buffer("inv_freq", frequencies, persistent=False)
            # Transformers does not adapt an unknown type to the batch.
            rotary.rope_type = "longrope of one length"


def stored_tensors(
    model: PreTrainedModel, name: str, tensor: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """Yield a parameter under each name that it has in the model's files.

    The files list experts one by one. In memory, Transformers stacks a layer's experts.
    """
    yield from revert_weight_conversion(model, {name: tensor}).items()
