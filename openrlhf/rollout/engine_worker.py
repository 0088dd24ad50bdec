"""The engine's half of a publication, in vLLM's workers: receive, load, and report what was loaded.

vLLM mixes `WorkerExtension` into its worker class, and `RolloutEngine` calls the methods through
`collective_rpc`. This is not one of vLLM's weight-transfer backends, because they return nothing to
verify.
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
from openrlhf.weights.receipts import WorkerReceipt
from openrlhf.weights.receiver import Intake
from openrlhf.weights.transport import Membership

# vLLM's bfloat16 attention uses the matrix registers of Intel CPUs (AMX). Linux refuses them to a
# process that has not asked for them, and vLLM does not ask. Unless oneDNN happened to ask before,
# the first sample ends the engine with SIGILL.
if torch.cpu._is_amx_tile_supported():
    torch.cpu._init_amx()
heed_seeds_on_cpu()  # here, because each worker of an engine imports this module


class WorkerExtension:
    """Methods added to vLLM's worker class. Our classes travel as pickled bytes: vLLM sends plain
    values only.
    """

    vllm_config: VllmConfig
    device: torch.device
    model_runner: Any
    publication = Membership()  # a process has one worker

    def publication_join(self, group: bytes, rank_offset: int) -> None:
        """Leave the previous weight group and join `group`, a pickled `WeightGroup`.

        `rank_offset`: the rank of the engine's first worker.
        """
        self.publication.join(
            pickle.loads(group), rank_offset + self.vllm_config.parallel_config.rank
        )

    def publication_receive(self, message: bytes) -> bytes:
        """Receive the weights of `message`, a pickled `WeightManifest`. Returns a pickled
        `WorkerReceipt`.

        No step may run meanwhile: the engine is paused and its scheduler waits for this call. If
        the call raises, the model has old, new and missing weights until a later call succeeds.
        """
        manifest: WeightManifest = pickle.loads(message)
        if self.publication.channel is None:
            raise RuntimeError("this engine is in no weight group: join one first")
        intake = Intake(manifest, self.publication.channel, self.device)
        if self.device.type != "cpu":
            torch.accelerator.synchronize(
                self.device
            )  # a pause of vLLM below 0.29 does not wait for kernels
        model = self.model_runner.get_model()
        handles = packed_handles(model)
        try:
            with set_current_vllm_config(self.vllm_config):
                if manifest.adapter:
                    handles = {}  # packed copies are of the model's own weights, which stay
                    unwritten = take_adapter(
                        self.model_runner.lora_manager, manifest.adapter, intake
                    )
                else:
                    unwritten = take_weights(model, self.vllm_config, intake)
        except BaseException:
            self.publication.leave()  # so that the sender does not wait for its deadline
            raise
        renewed = packed_handles(model)
        receipt = WorkerReceipt(
            rank=self.publication.rank,
            bucket_hashes=tuple(intake.hashes),
            sent_hashes=intake.sent_hashes,
            loads=dict(intake.loads),
            unwritten=tuple(unwritten),
            stale=tuple(name for name, handle in renewed.items() if handles.get(name) is handle),
        )
        return pickle.dumps(receipt)


def take_weights(model: nn.Module, config: VllmConfig, intake: Intake) -> list[str]:
    """Let the model's loader read what arrives. Returns the layers that it did not fill."""
    begin_reload(model)
    model.load_weights(intake.tensors())  # pyright: ignore[reportCallIssue]
    intake.finish()
    unwritten = unwritten_layers(model)
    finalize_layerwise_reload(model, config.model_config)
    repack_linears(model)
    return unwritten


def take_adapter(worker_manager: Any, settings: dict[str, Any], intake: Intake) -> list[str]:
    """Serve the adapter that arrives, in place of the previous one. Returns its layers that the
    engine cannot adapt.
    """
    tensors = dict(intake.tensors())
    intake.finish()
    manager = worker_manager._adapter_manager
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
    return sorted(adapter.loras.keys() - manager.modules.keys())


def begin_reload(model: nn.Module) -> None:
    """Start vLLM's layerwise reload: layers fill up tensor by tensor, and are processed when they
    are full.
    """
    for layer in model.modules():
        info = get_layerwise_info(layer)
        # clear the counts of an update that failed in the middle of the layer: vLLM would count
        # these tensors twice, treat the layer as full too early, and drop the remaining tensors
        info.loaded_weights.clear()
        info.load_numel = 0
        if (method := packed_experts(layer)) is not None:
            method.moe_kernel = None  # vLLM packs experts only while it builds their kernel
        if isinstance(layer, ParallelLMHead) and layer.bias is not None:
            # vLLM's loader of Transformers models makes a new bias for each update, which nothing
            # would count
            layer._register_bias = lambda: None
    initialize_layerwise_reload(model)


def unwritten_layers(model: nn.Module) -> list[str]:
    """Layers that the update has not filled, with counts. Must be called before the reload is
    finalised.

    vLLM only logs a warning for a layer without new values, and silently completes a partly filled
    layer. Some elements need no new value: padding of the vocabulary, buffers, elements that vLLM
    does not count, and a layer that shares its parameters with a filled layer (a tied head).
    """
    filled: set[int] = set()
    missing: dict[str, tuple[set[int], str]] = {}
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if not info.can_load():  # filled and processed: its final parameters are back in place
            filled |= {id(parameter) for parameter in layer.parameters(recurse=False)}
            continue
        parameters = {id(parameter) for parameter in (info.kernel_tensors or ({}, {}))[0].values()}
        numel = sum(parameter.numel() for parameter in layer.parameters(recurse=False))
        expected = min(numel, info.load_numel_total or 0) - vocabulary_padding(layer)
        if info.load_numel >= expected:
            filled |= parameters
        else:
            missing[name] = parameters, f"{name} ({info.load_numel} of {expected} elements written)"
    return [text for parameters, text in missing.values() if not parameters <= filled]


def vocabulary_padding(layer: nn.Module) -> int:
    """Number of elements of an embedding or head that belong to no token, because vLLM rounds
    vocabularies up.
    """
    if not isinstance(layer, VocabParallelEmbedding):
        return 0
    rows = layer.num_embeddings_per_partition - layer.shard_indices.num_org_elements
    return sum(rows * p[0].numel() for p in layer.parameters(recurse=False))


def packed_handles(model: nn.Module) -> dict[str, Any]:
    """Layers of a CPU engine with packed weights. The value is the object that the last packing
    made.
    """
    handles = {
        name: getattr(layer, "cpu_linear", expert_kernel(packed_experts(layer)))
        for name, layer in model.named_modules()
    }
    unpacked = (None, nn.functional.linear)
    return {name: handle for name, handle in handles.items() if handle not in unpacked}


def packed_experts(layer: nn.Module) -> Any:
    """The object that packs a mixture of experts on a CPU; None for any other layer."""
    method = getattr(layer, "quant_method", None)
    return method if current_platform.is_cpu() and hasattr(method, "moe_kernel") else None


def repack_linears(model: nn.Module) -> None:
    """Pack all packed layers again, because vLLM leaves a tied head with its old packed copy."""
    for layer in model.modules():
        weight = getattr(layer, "weight", None)
        if hasattr(layer, "cpu_linear") and isinstance(weight, Tensor) and weight.numel() > 0:
            dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
