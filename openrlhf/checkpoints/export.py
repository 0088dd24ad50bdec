"""Hugging Face exports: a folder that `from_pretrained` and a stock vLLM server load; of adapters, one that PEFT loads."""

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from openrlhf.models.adapters import save_adapter


def export_hf(
    buckets: Iterable[list[tuple[str, Tensor]]],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    path: str,
    *,
    writes: bool,
) -> None:
    """Write weights, configuration and tokenizer to the folder `path`, beside it first; other files there stay.

    `buckets` stream the whole parameters, of a model with adapters the trained ones. They may be collective: every rank
    iterates, the one that `writes` keeps them.
    """
    state: dict[str, Tensor] = {}
    for bucket in buckets:
        if writes:
            state |= {name: tensor.detach().to("cpu", copy=True) for name, tensor in bucket}
    if not writes:
        return
    final = Path(path).absolute()
    aside = final.with_name(f"{final.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    if hasattr(model, "peft_config"):
        save_adapter(model, state, aside)
    else:
        persistent = set(model.state_dict())  # buffers that checkpoints carry, besides the parameters
        state |= {name: buffer.cpu() for name, buffer in model.named_buffers() if name in persistent}
        with torch.no_grad():  # tied weights stay single, as Transformers writes them
            model.save_pretrained(aside, state_dict=state, safe_serialization=True)
        _declare_precision(aside / "config.json", state)
    tokenizer.save_pretrained(aside)
    final.mkdir(exist_ok=True)
    earlier = ("model*.safetensors*", "adapter_*")  # perhaps with more shards than this export, or of another kind
    for weights in (file for pattern in earlier for file in final.glob(pattern)):
        weights.unlink()
    for made in aside.iterdir():
        if made.is_dir():
            shutil.rmtree(final / made.name, ignore_errors=True)
        os.replace(made, final / made.name)
    aside.rmdir()


def _declare_precision(file: Path, state: dict[str, Tensor]) -> None:
    """Write the data type of the exported weights to the configuration. Transformers writes that of the model in memory."""
    config = json.loads(file.read_text())
    config["dtype"] = str(next(iter(state.values())).dtype).removeprefix("torch.")
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
