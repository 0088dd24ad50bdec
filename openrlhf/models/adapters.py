"""LoRA: low-rank updates of linear layers, trained alongside frozen weights.

Hu et al. 2021, arXiv:2106.09685
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from openrlhf.config.flags import UserError
from openrlhf.config.shared import LoraConfig
from openrlhf.models.stored_files import writable_configuration

PREFIX = "base_model.model."  # prefix of tensor names in PEFT's files


def add_adapters(
    model: PreTrainedModel, lora: LoraConfig, *, path: str, seed: int, head: str | None = None
) -> None:
    """Add new adapters to the model from `path`. New adapters do not change its outputs.

    Only the adapters and the scalar `head` are trained. The adapters are in float32 and depend only
    on `seed`, so all ranks get the same adapters. Raises UserError for target modules that the
    model does not have.
    """
    import peft  # only with --ds.lora.rank, because the import takes a second
    from peft.tuners.tuners_utils import BaseTunerLayer

    settings = peft.LoraConfig(
        task_type="SEQ_CLS" if head else "CAUSAL_LM",
        base_model_name_or_path=path,
        lora_dropout=lora.dropout,
        target_modules=adapter_targets(model, lora.target_modules, path),
        **scale_settings(lora),
        use_dora=lora.dora,
    )
    # Prevent PEFT from rounding the adapters to the layer's dtype.
    # The training engine does this rounding itself and keeps the exact values.
    in_float32 = patch.object(
        BaseTunerLayer,
        "_get_base_layer_device_and_dtype",
        lambda _, layer: (layer.weight.device, torch.float32),
    )
    with in_float32, torch.random.fork_rng(devices=[]):
        # Adapters are drawn on the CPU. torch.manual_seed would also reset the generators of GPUs,
        # and all ranks would then drop the same activations.
        torch.default_generator.manual_seed(seed)
        peft.inject_adapter_in_model(settings, model)
    if head:
        settings.modules_to_save = [head]
        model.get_submodule(head).requires_grad_(True)


def scale_settings(lora: LoraConfig) -> dict[str, Any]:
    """Return the PEFT settings of the update W + s·BA, keyed by name."""
    return {"r": lora.rank, "lora_alpha": lora.alpha, "use_rslora": lora.rslora}


def stored_name(name: str) -> str:
    """Return the name of a trained tensor in PEFT's files.

    PEFT's files store DoRA's magnitudes as tensors, not as layers.
    """
    name = name.replace(".default.", ".")
    return PREFIX + name.replace(".lora_magnitude_vector.weight", ".lora_magnitude_vector")


def adapter_targets(model: PreTrainedModel, wanted: tuple[str, ...], path: str) -> list[str]:
    """Return the names of the layers to adapt.

    `all-linear` selects every linear layer of the decoder. The output layer is adapted only if the
    layer is listed and not tied to the embeddings. Raises UserError for unknown
    layers, and if the model has no linear layers.
    """
    all_linear = wanted == ("all-linear",)
    adaptable = set(model.get_decoder().modules())
    output: Any = model.get_output_embeddings()
    if output is not None and output.weight is not model.get_input_embeddings().weight:
        if not all_linear:
            adaptable.add(output)
    names: list[str] = []
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and layer in adaptable:
            names.append(f".{name}")
    known = sorted({name.rpartition(".")[2] for name in names})
    if not known:
        raise UserError(
            f"--ds.lora.rank: {path} has no linear layers, to which adapters could be added "
            f"({model.config.model_type}). Leave out --ds.lora.rank."
        )
    if all_linear:
        return known
    unknown: list[str] = []
    for target in wanted:
        if not any(name.endswith(f".{target}") for name in names):
            unknown.append(target)
    if unknown:
        raise UserError(
            f"--ds.lora.target_modules {' '.join(unknown)}: {path} has no adaptable linear layer "
            f"with this name. Use {', '.join(known)}, or all-linear alone."
        )
    return list(wanted)


def unadapted_experts(model: PreTrainedModel, path: str) -> str | None:
    """Return a notice that experts get no adapters, or None if the model has no experts.

    Transformers keeps a layer's experts in stacked tensors, which are not linear layers.
    """
    expert_numel = 0
    total_numel = 0
    for name, weight in model.named_parameters():
        total_numel += weight.numel()
        if weight.dim() == 3 and ".experts." in name:
            expert_numel += weight.numel()
    if not expert_numel:
        return None
    share = expert_numel / total_numel
    return (
        f"--ds.lora.rank: {path} is a mixture of experts. Adapters train only the attention and "
        f"other linear layers; the experts, {share:.0%} of its weights, stay frozen. To train the "
        "experts too, drop --ds.lora.rank."
    )


def untie_adapted(model: PreTrainedModel) -> bool:
    """Untie the output layer from the embeddings if either has an adapter.

    Merging an adapter into a tied weight would change both layers. Returns whether the weights were
    tied.
    """
    output: Any = model.get_output_embeddings()
    embeddings: Any = model.get_input_embeddings()
    if output is None or not (_is_adapted(output) or _is_adapted(embeddings)):
        return False
    layer = _plain_layer(output)
    source = _plain_layer(embeddings)
    if layer.weight is not source.weight:
        return False
    layer.weight = nn.Parameter(source.weight.detach().clone(), requires_grad=False)
    model.config.get_text_config().tie_word_embeddings = False
    model.config.tie_word_embeddings = False
    return True


def _is_adapted(layer: nn.Module) -> bool:
    return hasattr(layer, "base_layer") or hasattr(layer, "modules_to_save")


def _plain_layer(layer: Any) -> Any:
    """Return the layer inside PEFT's wrapper."""
    return getattr(layer, "base_layer", getattr(layer, "original_module", layer))


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Disable the adapters until the block exits, so that the model acts as the reference."""
    layers: list[Any] = [layer for layer in model.modules() if hasattr(layer, "disable_adapters")]
    for layer in layers:
        layer._disable_adapters = True  # PEFT's own switch would also freeze the adapters
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def save_adapter(model: Any, trained: Mapping[str, Tensor], folder: Path) -> None:
    """Write the trained tensors in PEFT's adapter format, along with the model configuration."""
    stored = {stored_name(name): tensor for name, tensor in trained.items()}
    save_file(stored, folder / "adapter_model.safetensors")
    model.peft_config["default"].save_pretrained(folder)
    with writable_configuration(model.config):
        model.config.save_pretrained(folder)


def stored_adapter(folder: Path) -> dict[str, Tensor]:
    """Read the tensors of an adapter in PEFT's format."""
    from peft import load_peft_weights

    return load_peft_weights(str(folder), device="cpu")


def with_stored_adapter(folder: Path, load_base: Callable[[str], PreTrainedModel]) -> Any:
    """Return an adapter's base model with the adapter added by PEFT.

    `load_base` loads the base model from a folder or Hub name.
    """
    from peft import PeftConfig, PeftModel

    base = load_base(str(PeftConfig.from_pretrained(str(folder)).base_model_name_or_path))
    return PeftModel.from_pretrained(base, str(folder)).get_base_model()
