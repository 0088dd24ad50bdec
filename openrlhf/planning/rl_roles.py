"""The models and engines of each group of processes, for the flags of an RL command."""

from __future__ import annotations

import math
from dataclasses import replace

from openrlhf.config.groups import role_groups
from openrlhf.config.ppo import PPOConfig
from openrlhf.planning.memory import BUCKET_BYTES
from openrlhf.planning.model_files import read_shape
from openrlhf.planning.offline_roles import STEP_SHARE, frozen_role, ring_part, trained_role
from openrlhf.planning.roles import DTYPE_BYTES, EngineRole, Hosts, ModelRole, Pass, check_split
from openrlhf.units import GIB

NAMES = {"actor": "policy", "ref": "reference"}  # names in a plan, where they differ from roles
CPU_CACHE_BYTES = GIB  # `rollout.engine_settings.CPU_KV_CACHE_BYTES`


def rl_hosts(config: PPOConfig, *, on_gpus: bool) -> list[Hosts]:
    """Return the groups of processes of an RL run, with their models and engines."""
    hosts: list[Hosts] = []
    for group in role_groups(config):
        roles: list[ModelRole] = []
        for role in group.roles:
            roles += _rl_roles(config, role, group.processes, on_gpus)
        hosts.append(Hosts(processes=group.processes, roles=tuple(roles)))
    if config.rollout.replay_dir:
        return hosts
    engine, engines = _engine(config, on_gpus), config.vllm.num_engines
    if config.hybrid and not config.rollout.only:
        hosts[0] = replace(hosts[0], engine=engine, engines=engines)
    else:
        hosts.append(Hosts(processes=0, engine=engine, engines=engines))
    return hosts


def _rl_roles(config: PPOConfig, role: str, ranks: int, on_gpus: bool) -> list[ModelRole]:
    """Return the model of a role, or all models of the reward role."""
    ds, actor = config.ds, config.actor
    scoring = _rl_pass(config, config.rollout.micro_batch_size, config.rollout.max_tokens_per_gpu)
    if role == "reward":
        return _reward_models(config, scoring, ranks, on_gpus)
    path = actor.model_name_or_path
    if role == "teacher":
        path = config.local_teacher
    elif role == "critic":
        path = config.critic.model_name_or_path
    assert path
    shape = read_shape(path)
    if role == "critic":
        shape = shape.as_scalar()
    model = frozen_role(NAMES.get(role, role), shape, ds, ranks, on_gpus)
    model = replace(model, scoring=scoring)
    if role in ("ref", "teacher"):
        return [replace(model, param_offload=config.ref.offload)]
    optimizer = config.critic.optim if role == "critic" else actor.optim
    model = trained_role(model, config, optimizer, actor, ranks)
    model = _with_training(model, config, ranks)
    if role == "critic":
        return [replace(model, ema=False)]
    return [
        replace(
            model,
            entropy=actor.entropy_coef is not None,
            publishes=not config.rollout.replay_dir,
            adapter_only=ds.lora.served_rank > 0,
        )
    ]


def _reward_models(config: PPOConfig, scoring: Pass, ranks: int, on_gpus: bool) -> list[ModelRole]:
    models: list[ModelRole] = []
    for path in config.reward.models:
        shape = read_shape(path)
        model = frozen_role("reward", shape, config.ds, ranks, on_gpus)
        scored = scoring
        if path in config.reward.scalars:
            model = replace(model, shape=shape.as_scalar())
        else:
            scored = replace(scoring, scored=max(1, round(scoring.tokens * STEP_SHARE)))
        offload = config.reward.offload
        models.append(replace(model, scoring=scored, param_offload=offload, load_in_4bit=False))
    return models


def _with_training(role: ModelRole, config: PPOConfig, ranks: int) -> ModelRole:
    """Return the role with its largest training pass and its micro-batches per step."""
    train = config.train
    budget = train.max_tokens_per_gpu if train.dynamic_batch_enable else None
    of_rank = max(1, train.batch_size // config.ds.data_slices(ranks))
    micro = min(train.micro_batch_size, of_rank)
    batch = _rl_pass(config, micro, budget)
    per_micro = micro
    if budget:
        per_micro = max(1, budget * config.ds.ranks_per_slice // config.data.max_len)
    return replace(role, training=batch, window=math.ceil(of_rank / per_micro))


def _rl_pass(config: PPOConfig, samples: int, budget: int | None) -> Pass:
    """Return the largest pass for `samples` samples, or for a budget of tokens per device.

    A sample that exceeds the token budget gets its own pass.
    """
    length, ds = config.data.max_len, config.ds
    tokens = samples * length
    if budget:
        tokens = max(budget * ds.ranks_per_slice, length)
    answer = min(config.rollout.max_new_tokens or length, length)
    tokens = ring_part(tokens, ds.ring_attn_size)
    scored = max(1, round(tokens * answer / length))
    return Pass(tokens=tokens, longest=length, scored=scored, packed=ds.packing_samples)


def _engine(config: PPOConfig, on_gpus: bool) -> EngineRole:
    vllm, ds = config.vllm, config.ds
    share: float | None = None
    cache = int(vllm.engine_args.get("kv_cache_memory_bytes", CPU_CACHE_BYTES))
    if on_gpus:
        share = float(vllm.engine_args.get("gpu_memory_utilization", vllm.gpu_memory_utilization))
    shape = read_shape(config.actor.model_name_or_path)
    check_split(
        "vllm.tensor_parallel_size",
        vllm.tensor_parallel_size,
        shape.heads,
        what=f"attention heads of {config.actor.model_name_or_path}",
    )
    device = "cuda" if on_gpus else "cpu"
    largest = shape.largest_weight * DTYPE_BYTES[ds.param_dtype]
    return EngineRole(
        shape=shape,
        dtype=vllm.dtype,
        devices=vllm.devices,
        tp=vllm.tensor_parallel_size,
        memory_share=share,
        cache_bytes=cache,
        max_len=config.data.max_len,
        sleeps=vllm.enable_sleep and on_gpus,
        quantized=vllm.quantization is not None,
        bucket_bytes=max(BUCKET_BYTES[device], largest),
    )
