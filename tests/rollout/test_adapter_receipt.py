"""The receipt for a published adapter."""

from __future__ import annotations

import os
import subprocess
import sys

from openrlhf.rollout.engine_settings import engine_environment
from tests.ranks import ROOT

PUBLICATION = """
import pickle
from types import SimpleNamespace

import torch
from vllm.config import VllmConfig
from openrlhf.weights.buckets import TensorSpec, bucket_hash, bucket_nbytes, pack
from openrlhf.weights.manifest import PublicationError, WeightManifest
from openrlhf.weights.receipts import verify_receipts
from openrlhf.rollout import engine_worker
from openrlhf.weights import receiver


def publish(fault):
    names = [f"base_model.model.model.layers.{n}.mlp.up_proj.lora_{ab}.weight" for n in (0, 1) for ab in "AB"]
    specs = tuple(TensorSpec(name=name, dtype=torch.float32, shape=(4, 4)) for name in names)
    settings = {"r": 4, "lora_alpha": 8, "use_rslora": False}
    manifest = WeightManifest(version=3, specs=specs, bucket_bytes=128, adapter=settings)
    sent = []
    for bucket in manifest.buckets():
        buffer = torch.zeros(bucket_nbytes(bucket), dtype=torch.uint8)
        pack(bucket, [(spec.name, torch.ones(4, 4)) for spec in bucket], buffer)
        sent.append(buffer)
    sent.append(torch.tensor([bucket_hash(buffer) for buffer in sent]).view(torch.uint8))
    layers = [f"model.layers.{n}.mlp.up_proj" for n in (0, 1) if not (fault == "layer" and n)]
    taken = []
    manager = SimpleNamespace(
        device="cpu",
        lora_config=SimpleNamespace(lora_dtype=torch.float32),
        model=torch.nn.Module(),
        modules=dict.fromkeys(layers),
        remove_adapter=taken.append,
        add_adapter=taken.append,
        activate_adapter=taken.append,
    )
    worker = engine_worker.WorkerExtension()
    worker.vllm_config, worker.device = VllmConfig(), torch.device("cpu")
    worker.model_runner = SimpleNamespace(
        get_model=lambda: manager.model, lora_manager=SimpleNamespace(_adapter_manager=manager)
    )
    receive = lambda buffer: buffer.copy_(sent.pop(0))
    worker.publication.channel = SimpleNamespace(device="cpu", receive=receive)
    worker.publication.rank = 1
    unpack = receiver.unpack
    if fault == "tensor":
        receiver.unpack = lambda *of: (item for item in unpack(*of) if "layers.1" not in item[0])
    receipt = pickle.loads(worker.publication_receive(pickle.dumps(manifest)))
    receiver.unpack = unpack
    assert len(taken) == 3
    return manifest, receipt


for fault in ("none", "tensor", "layer"):
    manifest, receipt = publish(fault)
    try:
        verify_receipts(manifest, 0, [receipt])
        print("served")
    except PublicationError as error:
        print(error)
"""  # noqa: E501


def test_receipt_is_rejected_if_an_adapter_lacks_a_tensor_or_a_layer() -> None:
    """In one case a tensor is lost, and in the other the engine cannot adapt a layer."""
    environment = os.environ | engine_environment("cpu") | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PUBLICATION], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    whole, tensor, layer = done.stdout.splitlines()
    assert whole == "served"
    assert "worker 1" in tensor and "layers.1.mlp.up_proj.lora_A.weight 0 times" in tensor
    assert "version 3" in layer and "worker 1" in layer
    assert "model.layers.1.mlp.up_proj" in layer
