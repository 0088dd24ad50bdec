"""OpenRLHF: supervised, preference and reinforcement learning of language models on Ray, vLLM, DeepSpeed and Transformers."""

__version__ = "0.12.0"
