"""The vLLM side of a publication: loading the incoming weights and reporting the loaded tensors.

vLLM mixes `WorkerExtension` into its worker class, and `RolloutEngine` calls the methods through
`collective_rpc`. vLLM's weight-transfer backends are not used, because they return no result that
could be verified. The publication protocol is described at the top of `openrlhf.weights`.
"""

import pickle
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from openrlhf.rollout.engine_settings import ADAPTER_ID
from openrlhf.rollout.engine_versions import adapter_renames, expert_kernel, heed_seeds_on_cpu
from openrlhf.weights.manifest import WeightManifest
from openrlhf.weights.receiver import Delivery, LoadReport, WeightReceiver

# vLLM's bfloat16 attention uses the matrix registers of Intel CPUs (AMX).
# Linux requires a process to request these registers, but vLLM does not request them.
# Unless oneDNN has requested them, the first sample kills the engine with SIGILL.
if torch.cpu._is_amx_tile_supported():
    torch.cpu._init_amx()
heed_seeds_on_cpu()  # called here because every engine worker imports this module


class WorkerExtension:
    """Methods added to vLLM's worker class.

    Arguments of our own classes are passed as pickled bytes, because vLLM sends only plain values.
    """

    vllm_config: VllmConfig
    device: torch.device
    model_runner: Any
    publication = WeightReceiver()  # set on the class, because a process has one worker

    def publication_join(self, group: bytes, rank_offset: int) -> None:
        """Leave the previous weight group and join `group`, a pickled `WeightGroup`.

        `rank_offset` is the rank of the engine's first worker.
        """
        rank = rank_offset + self.vllm_config.parallel_config.rank
        self.publication.join(pickle.loads(group), rank)

    def publication_receive(self, message: bytes) -> bytes:
        """Receive the weights of a pickled `WeightManifest`, and return a pickled `WorkerReceipt`.

        No engine step may run at the same time: the engine is paused and its scheduler waits for
        this call. If the call raises, the model has a mix of old, new and missing weights until a
        later call succeeds.
        """
        manifest: WeightManifest = pickle.loads(message)
        if self.device.type != "cpu":
            # In vLLM versions before 0.29, a pause does not wait for kernels.
            torch.accelerator.synchronize(self.device)
        with set_current_vllm_config(self.vllm_config):
            receipt = self.publication.receive(manifest, self.device, self._load)
        return pickle.dumps(receipt)

    def _load(self, delivery: Delivery) -> LoadReport:
        if delivery.manifest.adapter is None:
            return load_model(self.model_runner.get_model(), self.vllm_config, delivery)
        manager = self.model_runner.lora_manager._adapter_manager
        return load_adapter(manager, delivery.manifest.adapter, delivery)


def load_model(model: nn.Module, config: VllmConfig, delivery: Delivery) -> LoadReport:
    """Load the model's weights in place."""
    packed_before = packed_handles(model)
    begin_reload(model)
    model.load_weights(delivery.tensors())  # pyright: ignore[reportCallIssue]
    unwritten = unwritten_layers(model)
    finalize_layerwise_reload(model, config.model_config)
    repack_linears(model)
    stale: list[str] = []
    for name, handle in packed_handles(model).items():
        if packed_before.get(name) is handle:
            stale.append(name)
    return LoadReport(unwritten=unwritten, stale=stale)


def load_adapter(manager: Any, settings: dict[str, Any], delivery: Delivery) -> LoadReport:
    """Replace the previous adapter with the incoming adapter.

    `manager` is vLLM's adapter manager. Tensors for layers that the engine cannot adapt are
    reported as unwritten. No weight is reported as stale, because packed copies belong to the
    model's own weights, which do not change.
    """
    tensors = dict(delivery.tensors())
    adapter = LoRAModel.from_lora_tensors(
        ADAPTER_ID,
        tensors,
        PEFTHelper.from_dict(settings | {"target_modules": []}),
        device=str(manager.device),
        dtype=manager.lora_config.lora_dtype,
        weights_mapper=adapter_renames(manager.model),
    )
    manager.remove_adapter(ADAPTER_ID)
    manager.add_adapter(adapter)
    manager.activate_adapter(ADAPTER_ID)
    return LoadReport(unwritten=sorted(adapter.loras.keys() - manager.modules.keys()), stale=())


def begin_reload(model: nn.Module) -> None:
    """Start vLLM's layerwise reload.

    Layers are filled tensor by tensor, and processed when they are full.
    """
    for layer in model.modules():
        info = get_layerwise_info(layer)
        # Clear the counts left by an update that failed in the middle of the layer.
        # Otherwise vLLM would count these tensors twice and treat the layer as full too early.
        info.loaded_weights.clear()
        info.load_numel = 0
        method = packed_experts(layer)
        if method is not None:
            method.moe_kernel = None  # vLLM packs the experts only when it builds their kernel
        if isinstance(layer, ParallelLMHead) and layer.bias is not None:
            # vLLM's loader for Transformers models creates a new bias for each update.
            # The new bias would not be counted.
            layer._register_bias = lambda: None
    initialize_layerwise_reload(model)


def unwritten_layers(model: nn.Module) -> list[str]:
    """Return the layers not filled by the update, with counts.

    Must be called before the reload is finalized. vLLM only logs a warning for a layer without new
    values, and silently completes a partially filled layer. Some elements need no new values:
    vocabulary padding, buffers, elements that vLLM does not count, and layers that share their
    parameters with a filled layer (tied heads).
    """
    filled: set[int] = set()
    unfilled: dict[str, set[int]] = {}  # name with counts → ids of the layer's parameters
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        own = list(layer.parameters(recurse=False))
        # the layer is filled and processed: its final parameters are back in place
        if not info.can_load():
            filled.update(id(parameter) for parameter in own)
            continue
        parameters: set[int] = set()
        if info.kernel_tensors:
            parameters.update(id(parameter) for parameter in info.kernel_tensors[0].values())
        numel = sum(parameter.numel() for parameter in own)
        expected = min(numel, info.load_numel_total or 0) - vocabulary_padding(layer)
        if info.load_numel >= expected:
            filled |= parameters
        else:
            unfilled[f"{name} ({info.load_numel} of {expected} elements written)"] = parameters
    return [layer for layer, parameters in unfilled.items() if not parameters <= filled]


def vocabulary_padding(layer: nn.Module) -> int:
    """Return the number of padding elements in an embedding or output head.

    vLLM rounds up the vocabulary size.
    """
    if not isinstance(layer, VocabParallelEmbedding):
        return 0
    rows = layer.num_embeddings_per_partition - layer.shard_indices.num_org_elements
    return sum(rows * p[0].numel() for p in layer.parameters(recurse=False))


def packed_handles(model: nn.Module) -> dict[str, Any]:
    """Return the CPU engine's layers with packed weights, by name.

    Each value is the object created by the most recent packing.
    """
    unpacked = (None, nn.functional.linear)
    handles: dict[str, Any] = {}
    for name, layer in model.named_modules():
        handle = getattr(layer, "cpu_linear", expert_kernel(packed_experts(layer)))
        if handle not in unpacked:
            handles[name] = handle
    return handles


def packed_experts(layer: nn.Module) -> Any:
    """Return the object that packs an experts layer on a CPU, or None for other layers."""
    method = getattr(layer, "quant_method", None)
    if current_platform.is_cpu() and hasattr(method, "moe_kernel"):
        return method
    return None


def repack_linears(model: nn.Module) -> None:
    """Repack all packed layers, because vLLM does not repack a tied head."""
    for layer in model.modules():
        weight = getattr(layer, "weight", None)
        if hasattr(layer, "cpu_linear") and isinstance(weight, Tensor) and weight.numel() > 0:
            dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
