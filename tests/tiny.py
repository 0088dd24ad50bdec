"""Tiny models and tokenizers that are created from scratch for tests."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3MoeConfig,
)

SPECIAL = ["<pad>", "<eos>", "<unk>", "<bos>"]
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz+-*/=.,?:ĠĊ"
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
HEADS: dict[str, int] = {
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # vLLM requires head size 32 on a CPU
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 3,
}


def tiny_config(kind: str, **changes: object) -> PretrainedConfig:
    """Return the configuration of a model with about 20,000 parameters."""
    sizes = SIZES | changes
    head_dim = sizes["hidden_size"] // sizes["num_attention_heads"]
    match kind:
        case "qwen2-tied":
            return Qwen2Config(**sizes, tie_word_embeddings=True)
        case "qwen2-untied":
            return Qwen2Config(**sizes, tie_word_embeddings=False)
        case "llama":
            return LlamaConfig(**sizes, tie_word_embeddings=False)
        case "llama-wide":  # some weights have at least 4,096 elements
            return LlamaConfig(**sizes | {"hidden_size": 64, "intermediate_size": 192})
        case "llama-wide-odd":  # the sizes of some weights are not multiples of 256
            return LlamaConfig(**sizes | {"hidden_size": 64, "intermediate_size": 194})
        case "llama-odd":  # sizes that are not divisible by the number of ranks
            return LlamaConfig(**sizes | {"vocab_size": 67, "intermediate_size": 65})
        case "mistral-windowed":
            return MistralConfig(**sizes, sliding_window=4, tie_word_embeddings=False)
        case "qwen3":
            return Qwen3Config(**sizes, head_dim=head_dim, tie_word_embeddings=True)
        case "qwen3-moe":
            return Qwen3MoeConfig(**EXPERTS | sizes, head_dim=head_dim)
        case "mixtral":
            return MixtralConfig(**sizes)
        case "gemma3":
            layers = ["sliding_attention", "full_attention"]
            return Gemma3TextConfig(
                **sizes, head_dim=head_dim, sliding_window=4, layer_types=layers
            )
        case _:
            raise ValueError(kind)


def character_tokenizer() -> Qwen2Tokenizer:
    """Return a tokenizer with one token per character.

    The characters are digits, lower-case letters, some punctuation, space (Ġ in byte-level
    tokenizers) and newline (Ċ).
    """
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}
    return Qwen2Tokenizer(
        vocab=vocabulary, merges=[], pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def sayable(text: str) -> str:
    """Return a text in lower case, without the characters that `character_tokenizer` lacks."""
    known = set(CHARACTERS) | {" ", "\n"}
    return "".join(character for character in text.lower() if character in known)


def save_tiny_model(
    path: Path,
    kind: str = "qwen2-tied",
    *,
    seed: int = 0,
    chat_template: str | None = None,
    **changes: object,
) -> str:
    """Save a random float32 model with its tokenizer to `path`."""
    torch.manual_seed(seed)
    hf = AutoModelForCausalLM.from_config(tiny_config(kind, **changes)).float()
    unbalance(hf)
    hf.save_pretrained(path)
    tokenizer = character_tokenizer()
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(path)
    return str(path)


def unbalance(hf: PreTrainedModel) -> None:
    """Make the routers of a mixture-of-experts model prefer some experts.

    Without this change, a random router has almost no preference.
    """
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            if name.endswith("gate.weight"):
                parameter.mul_(torch.linspace(1, 50, len(parameter))[:, None])


def save_reward_model(folder: Path, base: Path) -> Path:
    """Save the model in `base` with an untrained scalar head."""
    scores = AutoConfig.from_pretrained(base, num_labels=1)
    AutoModelForSequenceClassification.from_config(scores).save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder
