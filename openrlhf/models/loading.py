"""Loads Transformers models as the flags say: dtype, attention, gradient checkpointing."""

import json
import os
from collections.abc import Iterator
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
from openrlhf.config.flags import notice
from openrlhf.config.shared import LoadingConfig, LoraConfig, TrainedModelConfig
from openrlhf.models import packed_attention
from openrlhf.models.adapters import unadapted_experts, with_adapters
from openrlhf.models.weights import ModelError, StoredWeights, odd_experts, require_finite

# Configuration entries by which some architectures transform logits after the output layer.
LOGIT_TRANSFORMS = (
    "final_logit_softcapping",
    "logits_soft_cap",
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
)
STEP_TOKENS = "process_reward"  # in the config.json of a process reward model: its placeholder and reward tokens
SHOWN_FILES = 8  # names in a message
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

transformers_logging.disable_progress_bar()  # one bar per process and model would flood the logs


@dataclass(frozen=True, kw_only=True)
class LoadSpec:
    """The settings for loading one model. Built from the flags."""

    path: str
    ds: LoadingConfig  # resolved: the attention is the value in effect
    max_len: int | None = None  # tokens of the longest sequence of the run
    gradient_checkpointing: bool = False
    reentrant: bool = False
    trust_remote_code: bool = False
    lora: LoraConfig | None = None  # new adapters, if its rank is above 0
    seed: int = 0  # of new adapters
    spread: bool = False  # over the GPUs of this process, layer by layer, if there are any

    @classmethod
    def of(cls, config: ModelCommand, path: str) -> Self:
        """The settings for a model of this command. Attention, precision and packing are the same
        for all its models.
        """
        trusted = config.model.trust_remote_code
        return cls(path=path, ds=config.ds, max_len=config.data.max_len, trust_remote_code=trusted)

    def trained(self, model: TrainedModelConfig, lora: LoraConfig, seed: int) -> Self:
        """The settings for the same model where it is trained, with adapters if the flags ask for
        them.
        """
        checkpointing, reentrant = (
            model.gradient_checkpointing_enable,
            model.gradient_checkpointing_reentrant,
        )
        return replace(
            self, gradient_checkpointing=checkpointing, reentrant=reentrant, lora=lora, seed=seed
        )


def load_causal_lm(spec: LoadSpec) -> PreTrainedModel:
    """A causal language model, ready to train. Raises ModelError for unreadable or incomplete
    files, and as `check_is_causal`.
    """
    check_is_causal(spec)
    model, stored = read_model(AutoModelForCausalLM, spec, **pretrained_options(spec))
    stored.require_all()
    require_finite(model, spec.path)
    return prepared(model, spec)


def check_causal_lm(spec: LoadSpec) -> None:
    """Raise ModelError as `load_causal_lm` would, except for numbers that are not finite. Print
    notices.

    Reads names and sizes of the weights only, so that a run can do it before it starts a process.
    """
    check_is_causal(spec)
    if stored := named_weights(AutoModelForCausalLM, spec):
        stored.require_all()


def named_weights(model_class: Any, spec: LoadSpec, **more: Any) -> StoredWeights | None:
    """Compare names and sizes of the stored weights with the architecture. Print notices about
    unused weights, and about experts that adapters leave out.

    Returns None for a quantized model, whose names only its own loader knows.
    """
    if getattr(configuration(spec), "quantization_config", None):
        return None
    model, stored = read_model(
        model_class, spec, device_map="meta", trust_remote_code=spec.trust_remote_code, **more
    )
    if stored.notice:
        notice(stored.notice)
    if spec.lora and spec.lora.rank and (left_out := unadapted_experts(model, spec.path)):
        notice(left_out)
    del model
    return stored


def read_model(
    model_class: Any, spec: LoadSpec, **options: Any
) -> tuple[PreTrainedModel, StoredWeights]:
    """Load a model, and compare its files with its architecture. Every model that this package
    reads comes from here.
    """
    # cuDNN's attention builds a plan for each new shape of a batch: about 80 ms on an H100, and
    # nearly every batch has a new shape.
    torch.backends.cuda.enable_cudnn_sdp(False)
    with explaining_failures(spec), _quietly():
        model, report = model_class.from_pretrained(
            spec.path,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # the report has them, and `StoredWeights` refuses them
            **options,
        )
    return model, StoredWeights.of(spec.path, model, report)


@contextmanager
def _quietly() -> Iterator[None]:
    """Suppress Transformers' tables of missing and unused weights until the block exits; we report
    them.
    """
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)


def configuration(spec: LoadSpec) -> Any:
    """The stored configuration.

    Raises ModelError for files that cannot be read, and for positions whose frequencies depend on
    the batch.
    """
    if os.path.isdir(spec.path) and not os.path.exists(os.path.join(spec.path, "config.json")):
        files = ", ".join(sorted(os.listdir(spec.path))[:SHOWN_FILES]) or "nothing"
        raise ModelError(
            f"{spec.path} has no config.json, so it is not a model in Transformers' format. It holds: {files}. "
            "Choose another folder, or convert the model: Transformers has scripts for the formats of other libraries."
        )
    with explaining_failures(spec):
        config = AutoConfig.from_pretrained(spec.path, trust_remote_code=spec.trust_remote_code)
    kind, positions = _rope(config)
    if kind == "dynamic" and spec.max_len and positions and spec.max_len > positions:
        raise ModelError(
            f"{spec.path} has rope_type dynamic: beyond {positions} tokens its numbers depend on the longest sequence of a "
            f"batch. --data.max_len is {spec.max_len}: lower it to {positions}."
        )
    return config


def _rope(config: Any) -> tuple[str, int | None]:
    """The type of position scaling (`default`: none), and the number of positions."""
    stored = config.get_text_config().to_dict()
    given = (
        stored.get("rope_parameters") or {}
    )  # of the model, or of each type of its layers; "dynamic" sorts first
    kinds = {
        each.get("rope_type", "default")
        for each in (given, *given.values())
        if isinstance(each, dict)
    }
    return min(kinds - {"default"}, default="default"), stored.get("max_position_embeddings")


def end_tokens(config: Any) -> list[int]:
    """The tokens at which a model ends a text, by its stored configuration."""
    ends = config.get_text_config().eos_token_id
    return ends if isinstance(ends, list) else [] if ends is None else [ends]


def check_is_causal(spec: LoadSpec) -> None:
    """Raise ModelError unless the stored configuration is of a causal language model that is fully
    supported.

    Reads no weights, so that the check costs nothing at the start.
    """
    config = configuration(spec)
    for name in config.architectures or []:
        if "SequenceClassification" in name:
            raise ModelError(
                f"{spec.path} is a reward model or critic ({name}). Name a language model."
            )
    loaded: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    own_code = spec.trust_remote_code and getattr(config, "auto_map", None)
    if loaded is not None and not own_code and not isinstance(config, loaded.config_class):
        stored = ", ".join(config.architectures or [config.model_type])
        raise ModelError(
            f"{spec.path} is not a text-only model ({stored}). Transformers would load its language model alone, and an "
            "export would lose the rest. Name a text model."
        )
    reject_transformed_logits(config)


def step_tokens(spec: LoadSpec) -> tuple[str, list[str]]:
    """The placeholder of a process reward model, and its tokens for a right and a wrong step, from
    its config.json.

    Raises ModelError if they are not there.
    """
    check_is_causal(spec)
    stored = getattr(configuration(spec), STEP_TOKENS, None) or {}
    placeholder, judgements = stored.get("placeholder_token"), stored.get("reward_tokens") or []
    if not placeholder or len(judgements) < 2:
        example = {"placeholder_token": "\n", "reward_tokens": ["+", "-"]}
        raise ModelError(
            f"{spec.path} does not name its tokens. Train it by train_prm with --prm.reward_tokens, the one for a right step "
            f"first; or add them to its config.json, for example {json.dumps({STEP_TOKENS: example})}."
        )
    return placeholder, judgements


def reject_transformed_logits(architecture: PretrainedConfig) -> None:
    """Raise ModelError for an architecture that transforms logits after the output layer.

    The log-probabilities of such a model would be wrong here.
    """
    for name in LOGIT_TRANSFORMS:
        value = getattr(architecture.get_text_config(), name, None)
        if value not in (None, 1, 1.0):
            raise ModelError(
                f"{architecture.model_type} transforms its logits after the output layer (config.{name} = {value}); "
                "such models are not supported. Use an architecture with a plain output layer (Llama, Qwen, Mistral, …)."
            )


def check_positions(spec: LoadSpec) -> None:
    """Raise ModelError if --data.max_len exceeds the model's positions, and no scaling extends
    them.
    """
    kind, positions = _rope(configuration(spec))
    if spec.max_len and positions and spec.max_len > positions and kind == "default":
        raise ModelError(
            f"--data.max_len is {spec.max_len}, but {spec.path} has {positions} positions: lower --data.max_len."
        )


def pretrained_options(spec: LoadSpec) -> dict[str, Any]:
    """Keyword arguments of `from_pretrained` for any model."""
    dtype, attention = DTYPES[spec.ds.param_dtype], spec.ds.attn_implementation
    packed = spec.ds.packing_samples and attention == "sdpa"
    return {
        "dtype": dtype,
        "attn_implementation": packed_attention.NAME if packed else attention,
        "trust_remote_code": spec.trust_remote_code,
        "device_map": "auto" if spec.spread and torch.cuda.is_available() else None,
        "quantization_config": qlora(dtype) if spec.ds.load_in_4bit else None,
    }


def qlora(dtype: torch.dtype) -> BitsAndBytesConfig:
    """NF4, the scale of each block quantized too, computing in `dtype`.  Dettmers et al. 2023,
    arXiv:2305.14314
    """
    nf4: dict[str, Any] = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=dtype, **nf4)


@contextmanager
def explaining_failures(spec: LoadSpec) -> Iterator[None]:
    """Within it, a failure of Transformers to load a model becomes a ModelError that names the file
    or the flag.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        there = os.path.isdir(spec.path)
        what = (
            "cannot be read (an incomplete download?)"
            if there
            else "is no folder here, and the hub did not give it"
        )
        raise ModelError(f"the model in {spec.path} {what}: {error}") from error
    except (
        ImportError,
        KeyError,
        ValueError,
    ) as error:  # KeyError: of architectures with an own table of attentions
        if "trust_remote_code" in str(error):
            raise ModelError(
                f"the model {spec.path} comes with its own code: if you trust the code, add --model.trust_remote_code"
            ) from error
        if "attention implementation" in str(error) or packed_attention.NAME in str(error):
            # Eager attention is correct for packed rows in few architectures; others only seem so,
            # for short texts.
            advice = (
                "drop --ds.packing_samples"
                if spec.ds.packing_samples
                else "try --ds.attn_implementation eager"
            )
            raise ModelError(
                f"{spec.path} does not support {spec.ds.attn_implementation} attention: {advice}. {error}"
            ) from error
        raise ModelError(f"the model {spec.path} cannot be loaded: {error}") from error
    except StrictDataclassError as error:  # a configuration that contradicts itself
        raise ModelError(f"{os.path.join(spec.path, 'config.json')} is wrong: {error}") from error
    except torch.OutOfMemoryError:
        raise
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        IndexError,
        RuntimeError,
        TypeError,
    ) as error:
        if odd := odd_experts(
            spec.path
        ):  # Transformers stacks experts, and names none of them if it cannot
            raise ModelError(
                f"the weights in {spec.path} do not match its config.json: {odd}. Download or export the model again."
            ) from error
        raise ModelError(
            f"the model {spec.path} cannot be built from config.json and its weights: {type(error).__name__}: {error}"
        ) from error


def prepared(model: PreTrainedModel, spec: LoadSpec, *, head: str | None = None) -> PreTrainedModel:
    """The model with one set of position frequencies; with adapters and gradient checkpointing if
    the flags ask for it.

    `head` names the head of a scalar model, which is trained beside adapters.
    """
    if spec.max_len:
        pin_longrope(model, spec.max_len)
    for layer in model.modules() if spec.ds.load_in_4bit else ():
        # Otherwise the first evaluation on a CPU packs the weights for kernels that have no
        # gradient.
        layer.support_avx512bf16_for_cpu = False  # pyright: ignore[reportArgumentType]
    if spec.lora and spec.lora.rank:
        model = with_adapters(model, spec.lora, path=spec.path, seed=spec.seed, head=head)
        if spec.reentrant:  # a layer without an input that has a gradient would get none
            model.enable_input_require_grads()
    if spec.gradient_checkpointing:
        options: dict[str, Any] = {"use_reentrant": spec.reentrant}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    return model


def pin_longrope(model: PreTrainedModel, max_len: int) -> None:
    """Give all sequences the position frequencies of `max_len` tokens, as the engine does.

    LongRoPE has two sets of frequencies, and Transformers chooses one by the longest sequence of
    each batch: a result would depend on the other sequences of the batch.
    """
    for module in model.modules():
        if getattr(module, "rope_type", None) == "longrope":
            rotary: Any = module
            frequencies, rotary.attention_scaling = ROPE_INIT_FUNCTIONS["longrope"](
                rotary.config, device=rotary.inv_freq.device, seq_len=max_len
            )
            rotary.register_buffer("inv_freq", frequencies, persistent=False)
            rotary.rope_type = (
                "longrope of one length"  # under this name Transformers ignores the batch
            )


def stored_tensors(
    model: PreTrainedModel, name: str, tensor: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """A parameter under the names of the model's files.

    The files list experts one by one; in memory Transformers stacks the experts.
    """
    yield from revert_weight_conversion(model, {name: tensor}).items()
