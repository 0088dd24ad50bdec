"""Estimates the time of a complete step of a command from its flags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openrlhf.config.supervised import DPOConfig, ReferencedConfig, SupervisedConfig
from openrlhf.planning import speed
from openrlhf.planning.cluster import Cluster
from openrlhf.planning.plan import hosts_of
from openrlhf.planning.roles import Hosts, ModelRole, Pass
from openrlhf.planning.usage import gib


def step_lines(config: Any, cluster: Cluster) -> list[str]:
    """Return the estimated seconds per step as text, if all sequences have the maximum length."""
    if not cluster.on_gpus:
        return ["--speed requires a GPU cluster, because the speed of CPUs is not known."]
    groups = hosts_of(config, ranks=cluster.devices, on_gpus=True)
    if isinstance(config, SupervisedConfig):
        model = groups[0].roles[0]
        assert model.training
        tokens = _batch_tokens(config, model, model.training)
        seconds, lines = _training(groups, cluster, tokens=tokens, updates=1, config=config)
        scoring = _frozen_seconds(config, groups[0].roles, cluster)
        if scoring:
            seconds += scoring
            lines.append(f"  score: {scoring:.1f} s")
    else:
        seconds, lines = _rl(config, groups, cluster)
        tokens = config.samples * config.data.max_len
    throughput = tokens / seconds / cluster.devices
    head = (
        f"Estimated step: {seconds:.1f} s for {tokens:,} tokens ({throughput:,.0f} tokens per "
        "second and device), if every sequence has --data.max_len tokens."
    )
    return [head, *lines]


def _batch_tokens(config: SupervisedConfig, model: ModelRole, batch: Pass) -> int:
    """Return the total number of tokens in all passes like `batch` in an optimizer step."""
    of_rank = max(1, config.train.batch_size // model.dp)
    micro = min(config.train.micro_batch_size, of_rank)
    # sequences per sample (two for pairs)
    rows = max(1, round(batch.tokens * model.sp / (micro * config.data.max_len)))
    return config.train.batch_size * rows * config.data.max_len


def _frozen_seconds(
    config: SupervisedConfig, roles: Sequence[ModelRole], cluster: Cluster
) -> float:
    """Return the time of the reference's or teacher's passes in a step, in seconds."""
    frozen = [role for role in roles if not role.trained]
    if isinstance(config, ReferencedConfig):
        is_precomputed = isinstance(config, DPOConfig) and config.ref.precompute
        if is_precomputed or not config.needs_reference:
            return 0.0
        if config.reference_is_policy:
            frozen = list(roles)  # the policy with its adapters disabled
    seconds = 0.0
    for role in frozen:
        assert role.scoring
        tokens = _batch_tokens(config, role, role.scoring)
        seconds += speed.scoring_seconds(role, cluster, tokens=tokens, length=config.data.max_len)
    return seconds


def _training(
    groups: Sequence[Hosts], cluster: Cluster, *, tokens: int, updates: int, config: Any
) -> tuple[float, list[str]]:
    """Return the seconds taken by all optimizer steps, and a line for each trained model.

    Models on the same devices are trained one after the other.
    """
    length = config.data.max_len
    longest = 0.0
    lines: list[str] = []
    for group in groups:
        seconds = 0.0
        for role in group.roles:
            if role.trained:
                time = speed.training_time(role, cluster, tokens=tokens // updates, length=length)
                seconds += updates * time.seconds
                lines.append(
                    f"  train {role.name}: {updates} x {time.seconds:.1f} s (compute "
                    f"{time.compute:.1f}, communication {time.communication:.1f}, CPU optimizer "
                    f"{time.optimizer:.1f}), {gib(time.sent_bytes)} sent per device and step"
                )
        longest = max(longest, seconds)
    return longest, lines


def _rl(config: Any, groups: Sequence[Hosts], cluster: Cluster) -> tuple[float, list[str]]:
    """Return the seconds taken by an RL step, and a line for each of its phases."""
    length, samples = config.data.max_len, config.samples
    answer = min(config.rollout.max_new_tokens or length // 2, length)
    tokens = samples * length
    lines: list[str] = []
    generation = 0.0
    for group in groups:
        if group.engine:
            generation = speed.generation_seconds(
                group.engine,
                cluster,
                engines=group.engines,
                samples=samples,
                prompt=length - answer,
                answer=answer,
            )
            lines.append(f"  generate: {generation:.1f} s")
    scoring = 0.0
    for group in groups:
        scoring = max(scoring, _scoring(group.roles, cluster, tokens=tokens, length=length))
    lines.append(f"  score: {scoring:.1f} s")
    updates = config.updates_of(config.rollout.batch_size)
    trained, parts = _training(
        groups, cluster, tokens=tokens * config.train.max_epochs, updates=updates, config=config
    )
    seconds = generation + scoring + trained
    if config.train.async_enable:
        seconds = max(generation, scoring + trained)
    return seconds, [*lines, *parts]


def _scoring(roles: Sequence[ModelRole], cluster: Cluster, *, tokens: int, length: int) -> float:
    seconds = 0.0
    for role in roles:
        seconds += speed.scoring_seconds(role, cluster, tokens=tokens, length=length)
    return seconds
