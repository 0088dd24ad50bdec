"""The configuration of a model whose code lies in its own folder."""

from transformers import LlamaConfig


class BaichuanConfig(LlamaConfig):
    """That of a Llama whose heads all have keys and values of their own."""

    model_type = "baichuan"
