"""LoRA: low-rank updates of linear layers, trained beside frozen weights.  Hu et al. 2021, arXiv:2106.09685"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from openrlhf.config.flags import UserError

if TYPE_CHECKING:  # `loading` imports this module
    from openrlhf.config.shared import LoraConfig

EVERY_LINEAR = ("all-linear",)
FILES = ("adapter_model.safetensors", "adapter_config.json")
PREFIX = "base_model.model."  # of the names in PEFT's files


def with_adapters(
    model: PreTrainedModel, lora: LoraConfig, *, path: str, seed: int, head: str | None = None
) -> PreTrainedModel:
    """The model of `path` with new adapters, which change nothing yet. They alone are trained, and the scalar `head`.

    The adapters depend on `seed` alone, so that they are equal on every rank. Raises UserError for target modules that
    the model does not have.
    """
    import peft  # only with --ds.lora.rank: it takes a second

    names = _targets(model, lora.target_modules, path, head)
    settings = peft.LoraConfig(
        task_type="SEQ_CLS" if head else "CAUSAL_LM",
        base_model_name_or_path=path,
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=names,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(settings, model)
    if head:
        settings.modules_to_save = [head]
        model.get_submodule(head).requires_grad_(True)
    return model


def _targets(model: PreTrainedModel, wanted: tuple[str, ...], path: str, head: str | None) -> list[str]:
    """The names of the layers to adapt. `all-linear` is every linear layer of the decoder."""
    decoder: nn.Module = model.get_decoder()
    output = model.get_output_embeddings()
    tied = output is None or output.weight is model.get_input_embeddings().weight
    outside = {head} | ({name for name, layer in model.named_modules() if layer is output} if tied else set())
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    of_decoder = {id(layer) for layer in decoder.modules()}
    if wanted == EVERY_LINEAR:
        return sorted({name.rpartition(".")[2] for name, layer in layers.items() if id(layer) in of_decoder})
    known = layers.keys() - outside
    if unknown := [each for each in wanted if not any(f".{name}".endswith(f".{each}") for name in known)]:
        raise UserError(
            f"--ds.lora.target_modules {' '.join(unknown)}: {path} has no linear layer of that name that can be adapted. It "
            f"has {', '.join(sorted({name.rpartition('.')[2] for name in known}))}; all-linear means every layer below "
            "the output layer."
        )
    return list(wanted)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Within it, the model computes what it computed before the training: the reference."""
    layers: list[Any] = [layer for layer in model.modules() if hasattr(layer, "disable_adapters")]
    for layer in layers:
        layer._disable_adapters = True  # PEFT's own switch would also freeze the adapters
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def save_adapter(model: PreTrainedModel, trained: Mapping[str, Tensor], folder: Path) -> None:
    """Write the trained tensors as an adapter in PEFT's format, and the model's configuration."""
    from peft import get_peft_model_state_dict

    settings: Any = getattr(model, "peft_config", {})["default"]
    state = get_peft_model_state_dict(model, dict(trained), save_embedding_layers=False)
    state |= {name: tensor for name, tensor in trained.items() if ".lora_" not in name}  # the scalar head
    save_file({PREFIX + name: tensor.contiguous() for name, tensor in state.items()}, folder / FILES[0])
    settings.save_pretrained(folder)
    model.config.save_pretrained(folder)


def is_adapted(model: nn.Module) -> bool:
    """Whether the model has adapters."""
    return hasattr(model, "peft_config")
