"""Gathers the full parameters of a model in training from the ranks, bucket by bucket.

Parameters are named as in the Transformers model. All ranks must run the generators. The tensors of
a bucket are valid until the next bucket is requested.
"""

import math
from collections.abc import Iterable, Iterator

from openrlhf.training.engine import TrainEngine
from openrlhf.training.masters import whole_master
from openrlhf.training.quiet_deepspeed import deepspeed
from openrlhf.training.whole import WholeTensor, has_adapters, trained_tensors, whole_tensors
from openrlhf.weights.buckets import NamedTensor, cut_into_buckets


def full_parameters(engine: TrainEngine, bucket_bytes: int) -> Iterator[list[NamedTensor]]:
    """Return the plain model's parameters, with adapters merged and tied weights listed once."""
    return _gathered(engine, whole_tensors(engine.hf), bucket_bytes)


def exported_parameters(
    engine: TrainEngine, bucket_bytes: int, *, masters: bool = False
) -> Iterator[list[NamedTensor]]:
    """Yield the parameters to export: only the adapters if there are any, else the plain model.

    If `masters` is true, the float32 master weights are yielded instead of the rounded weights. The
    engine must be awake.
    """
    if not masters or engine.changes is None:
        yield from _gathered(engine, _exported_tensors(engine), bucket_bytes)
        return
    tensors = list(_exported_tensors(engine))
    trained = [tensor for tensor in tensors if tensor.parts[0].requires_grad]
    frozen = [tensor for tensor in tensors if not tensor.parts[0].requires_grad]
    for bucket in cut_into_buckets(trained, WholeTensor.nbytes, bucket_bytes):
        yield [(tensor.name, whole_master(tensor.parts[0])) for tensor in bucket]
    for gathered in _gathered(engine, frozen, bucket_bytes):
        yield [(name, weight.float()) for name, weight in gathered]


def exported_bytes(engine: TrainEngine) -> int:
    """Return the size of an export in bytes.

    An export of the EMA is larger, because it is float32; this estimate ignores the difference.
    """
    weights = sum(math.prod(tensor.shape) for tensor in _exported_tensors(engine))
    return weights * engine.hf.dtype.itemsize


def _exported_tensors(engine: TrainEngine) -> Iterator[WholeTensor]:
    if has_adapters(engine.hf):
        return trained_tensors(engine.hf)
    return whole_tensors(engine.hf)


def _gathered(
    engine: TrainEngine, tensors: Iterable[WholeTensor], bucket_bytes: int
) -> Iterator[list[NamedTensor]]:
    engine.free_gathered()
    for bucket in cut_into_buckets(tensors, WholeTensor.nbytes, bucket_bytes):
        parameters = []
        for tensor in bucket:
            parameters += tensor.parts
        with deepspeed.zero.GatheredParameters(parameters, enabled=engine.sharded):
            yield [(tensor.name, tensor.make()) for tensor in bucket]
