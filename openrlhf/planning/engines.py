"""Memory that vLLM allocates for an inference engine on one of its devices."""

from __future__ import annotations

from openrlhf.planning.constants import Constants
from openrlhf.planning.roles import DTYPE_BYTES, EngineRole
from openrlhf.planning.usage import Instant, Usage


def cache_bytes_per_token(engine: EngineRole) -> float:
    """Return the size of a token's keys and values on one device of an engine, in bytes.

    Tensor parallelism splits the heads. If there are fewer key-value heads than devices, each
    device has one head, and some devices have the same head. Latent attention (MLA) caches one
    vector for all heads, on every device.
    """
    shape = engine.shape
    layers = shape.layers / (engine.devices / engine.tp)
    if shape.latent:
        return layers * shape.latent * DTYPE_BYTES[engine.dtype]
    heads = max(1, shape.kv_heads // engine.tp)
    return 2 * layers * heads * shape.head_dim * DTYPE_BYTES[engine.dtype]


def smallest_engine(engine: EngineRole, constants: Constants) -> int:
    """Return how many bytes an engine needs on a device to serve one sequence of `max_len`."""
    cache = cache_bytes_per_token(engine) * engine.max_len
    return round(engine.weight_bytes + cache + constants.engine_bytes)


def predict_engine(
    engine: EngineRole, constants: Constants, device_bytes: int
) -> dict[Instant, Usage]:
    """Return the peak of an engine on one of its devices, by instant.

    vLLM fills its share of a GPU with KV cache. An engine with sleep mode is already asleep when
    the models on its devices are loaded.
    """
    weights = round(engine.weight_bytes)
    cache = engine.cache_bytes
    if engine.memory_share is not None:
        room = engine.memory_share * device_bytes
        cache = max(0, round(room) - weights - constants.engine_bytes)
    fixed = Usage(framework=constants.engine_process_bytes)
    loaded = fixed + Usage(weights=weights, framework=constants.engine_bytes)
    awake = loaded + Usage(kv_cache=cache)
    publication = Usage(publication=engine.bucket_bytes)
    if not engine.sleeps:
        return dict.fromkeys(Instant, awake) | {Instant.PUBLISH: awake + publication}
    usage = dict.fromkeys(Instant, fixed)
    usage[Instant.GENERATE] = awake
    usage[Instant.PUBLISH] = loaded + publication
    return usage
