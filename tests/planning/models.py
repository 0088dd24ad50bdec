"""Configurations of published models, as in their config.json files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}
# The model that is measured on GPUs (docs/gpu.md). Its type and its window are not included.
QWEN2_390M: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
}
MEASURED = QWEN2_390M | {"model_type": "qwen2", "tie_word_embeddings": True}
MODELS: dict[str, dict[str, Any]] = {
    "llama2-7b": LLAMA | {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32},
    "llama2-13b": LLAMA
    | {
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
    },
    "codellama-34b": LLAMA
    | {
        "hidden_size": 8192,
        "intermediate_size": 22016,
        "num_hidden_layers": 48,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    "llama2-70b": LLAMA
    | {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    "qwen2.5-7b": {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "llama3.1-405b": LLAMA
    | {
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
}
# Billions of parameters, as stated in publications and model cards.
PUBLISHED = {
    "llama2-7b": 6.74,
    "llama2-13b": 13.02,
    "codellama-34b": 33.74,
    "llama2-70b": 68.98,
    "qwen2.5-7b": 7.62,
    "llama3.1-405b": 405.85,
}


def write_models(folder: Path) -> dict[str, str]:
    """Write a folder with a config.json for each model, and return the folders by model name."""
    paths: dict[str, str] = {}
    for name, config in MODELS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
        paths[name] = str(folder / name)
    return paths
