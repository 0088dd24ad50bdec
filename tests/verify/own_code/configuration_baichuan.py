"""The configuration of a model whose code is in its own folder."""

from transformers import LlamaConfig


class BaichuanConfig(LlamaConfig):
    """The configuration of a Llama whose heads all have their own keys and values."""

    model_type = "baichuan"
