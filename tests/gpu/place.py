"""Shared parts of the GPU checks: the device, a model and an engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import Qwen2ForCausalLM

from openrlhf.config.rollout import VLLMConfig
from openrlhf.rollout.engine_settings import EngineSettings, engine_environment
from tests.gpu.rehearsal import REHEARSAL
from tests.tiny import character_tokenizer, tiny_config

DEVICE: Literal["cuda", "cpu"] = "cpu" if REHEARSAL else "cuda"
TRANSPORT = "gloo" if REHEARSAL else "ipc"
# The model for a GPU has 390 million parameters.
SIZES: dict[str, Any] = (
    {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 1000}
    if REHEARSAL
    else {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "vocab_size": 32_000,
    }
)


def save_model(folder: Path, **changes: Any) -> Qwen2ForCausalLM:
    """Save a random bfloat16 Qwen2 and a tokenizer to `folder`; return the model on the device."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": SIZES["hidden_size"] // 64, "max_position_embeddings": 2048}
    model = (
        Qwen2ForCausalLM(tiny_config("qwen2-tied", **heads | SIZES | changes))
        .to(DEVICE, torch.bfloat16)
        .eval()
    )
    model.save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return model


@contextmanager
def started_engine(folder: Path, **vllm: Any) -> Iterator[Any]:
    """Start a rollout engine with Ray on the GPU, as a run does.

    CUDA graphs are off unless `vllm` turns them on. Compiling the model and capturing CUDA graphs
    would take most of the minute and a half that an engine needs to become ready.
    """
    import ray

    from openrlhf.rollout.engine import RolloutEngine

    config = VLLMConfig(dtype="bf16", gpu_memory_utilization=0.3, **{"enforce_eager": True, **vllm})
    settings = EngineSettings(model=str(folder), vllm=config, max_model_len=1024, device=DEVICE)
    gpus = 0 if REHEARSAL else 1
    ray.init(address="local", num_gpus=gpus, include_dashboard=False)
    try:
        environment = {"env_vars": engine_environment(DEVICE)}
        remote: Any = ray.remote(RolloutEngine)
        engine = remote.options(num_gpus=gpus, runtime_env=environment).remote(0)
        ray.get(engine.start.remote(settings), timeout=240)
        yield engine
    finally:
        ray.shutdown()
