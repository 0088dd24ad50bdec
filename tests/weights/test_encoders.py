"""Tests that an encoder's manifest lists exactly the tensors sent, in the same order."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from openrlhf.weights.buckets import NamedTensor
from openrlhf.weights.encoders import Encoder

WEIGHTS = {"experts": torch.randn(2, 3, 4), "norm": torch.randn(3)}


def split_experts(name: str, tensor: Tensor) -> Iterator[NamedTensor]:
    """Yield stacked experts one by one, named as in the model's files."""
    if name != "experts":
        yield name, tensor
        return
    for number, expert in enumerate(tensor):
        yield f"experts.{number}", expert


def new_encoder(adapter: dict | None = None) -> Encoder:
    return Encoder(
        blanks=[(name, tensor.to("meta")) for name, tensor in WEIGHTS.items()],
        gathered=lambda bucket_bytes: [[item] for item in WEIGHTS.items()],
        stored=split_experts,
        adapter=adapter,
    )


def test_manifest_lists_names_and_shapes_of_encoded_tensors_in_order() -> None:
    encoder = new_encoder()
    manifest = encoder.manifest(version=5, dtype=torch.bfloat16, bucket_bytes=64)
    assert (manifest.version, manifest.bucket_bytes, manifest.adapter) == (5, 64, None)
    assert {spec.dtype for spec in manifest.specs} == {torch.bfloat16}
    sent = [(name, tuple(tensor.shape)) for name, tensor in encoder.encode(WEIGHTS.items())]
    assert [(spec.name, spec.shape) for spec in manifest.specs] == sent
    assert [name for name, _ in sent] == ["experts.0", "experts.1", "norm"]


def test_adapter_manifest_contains_the_adapter_settings() -> None:
    manifest = new_encoder({"r": 4}).manifest(version=1, dtype=torch.float32, bucket_bytes=64)
    assert manifest.adapter == {"r": 4}


def test_encoder_reads_each_tensor_before_requesting_the_next() -> None:
    requested: list[str] = []

    def stream() -> Iterator[NamedTensor]:
        for name, tensor in WEIGHTS.items():
            requested.append(name)
            yield name, tensor

    encoded = new_encoder().encode(stream())
    assert [next(encoded)[0], next(encoded)[0]] == ["experts.0", "experts.1"]
    assert requested == ["experts"]
