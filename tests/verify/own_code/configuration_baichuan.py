"""The configuration of a model whose code is in the model's own folder."""

from transformers import LlamaConfig


class BaichuanConfig(LlamaConfig):
    """The configuration of a Llama model in which every head has its own keys and values."""

    model_type = "baichuan"
