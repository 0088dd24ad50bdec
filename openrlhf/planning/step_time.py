"""Estimates the time of a complete step of a command from its flags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openrlhf.config.supervised import (
    DPOConfig,
    KDConfig,
    KTOConfig,
    ReferencedConfig,
    SupervisedConfig,
)
from openrlhf.planning import speed
from openrlhf.planning.cluster import Cluster
from openrlhf.planning.plan import hosts_of
from openrlhf.planning.roles import Hosts, ModelRole, Pass
from openrlhf.planning.usage import gib


def step_lines(config: Any, cluster: Cluster) -> list[str]:
    """Return text with the estimated time per step if all sequences have the maximum length."""
    if not cluster.on_gpus:
        return ["--speed requires a GPU cluster, because the speed of CPUs is not known."]
    groups = hosts_of(config, ranks=cluster.devices, on_gpus=True)
    if isinstance(config, SupervisedConfig):
        model = groups[0].roles[0]
        assert model.training
        tokens = _batch_tokens(config, model, model.training)
        seconds, lines = _training(groups, cluster, tokens=tokens, updates=1, config=config)
        scoring = _first_pass_seconds(config, groups[0].roles, cluster)
        if scoring:
            seconds += scoring
            lines.append(f"  score: {scoring:.1f} s")
    else:
        seconds, lines = _rl(config, groups, cluster)
        tokens = config.samples * config.data.max_len
    throughput = tokens / seconds / cluster.devices
    head = (
        f"Estimated step: {seconds:.1f} s for {tokens:,} tokens ({throughput:,.0f} tokens per "
        "second per device), if every sequence has --data.max_len tokens. Not measured."
    )
    return [head, *lines]


def _batch_tokens(config: SupervisedConfig, model: ModelRole, batch: Pass) -> int:
    """Return the total number of tokens in an optimizer step whose passes are like `batch`."""
    of_rank = max(1, config.train.batch_size // model.dp)
    micro = min(config.train.micro_batch_size, of_rank)
    # number of sequences per sample (two for pairs)
    rows = max(1, round(batch.tokens * model.sp / (micro * config.data.max_len)))
    return config.train.batch_size * rows * config.data.max_len


def _first_pass_seconds(
    config: SupervisedConfig, roles: Sequence[ModelRole], cluster: Cluster
) -> float:
    """Return the time in seconds that the passes without gradient take in a step.

    The reference or the teacher runs these passes. For KTO's KL, the policy also runs such a pass.
    """
    policy, *frozen = roles
    if isinstance(config, DPOConfig) and config.ref.precompute:
        frozen = []
    elif isinstance(config, ReferencedConfig):
        if config.needs_reference and config.reference_is_policy:
            frozen = [policy]  # with its adapters disabled
    passes = [(role, role.scoring) for role in frozen]
    if isinstance(config, KTOConfig):  # each trained text has a second text for the KL
        passes.insert(0, (policy, policy.training))
    heads: float | None = None
    if isinstance(config, KDConfig) and config.kd.top_k is None:
        heads = 2  # the student's forward and backward passes run the teacher's output layer
    seconds = 0.0
    for role, batch in passes:
        assert batch
        seconds += speed.scoring_seconds(
            role,
            cluster,
            tokens=_batch_tokens(config, role, batch),
            length=config.data.max_len,
            heads=heads,
        )
    return seconds


def _training(
    groups: Sequence[Hosts], cluster: Cluster, *, tokens: int, updates: int, config: Any
) -> tuple[float, list[str]]:
    """Return the time in seconds of all optimizer steps, and a line for each trained model.

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
    """Return the time in seconds of an RL step, and a line for each phase of the step."""
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
        scoring = max(scoring, _scoring(config, group.roles, cluster, tokens=tokens))
    if scoring:
        lines.append(f"  score: {scoring:.1f} s")
    updates = config.updates_of(config.rollout.batch_size)
    trained, parts = _training(
        groups, cluster, tokens=tokens * config.train.max_epochs, updates=updates, config=config
    )
    seconds = generation + scoring + trained
    if config.train.async_enable:
        seconds = max(generation, scoring + trained)
    return seconds, [*lines, *parts]


def _scoring(config: Any, roles: Sequence[ModelRole], cluster: Cluster, *, tokens: int) -> float:
    """Return the time in seconds that models on the same devices take to score a step's samples."""
    seconds = 0.0
    for role in roles:
        passes = 1
        if role.name == "policy":
            passes = int(config.needs_old_policy)
            if config.ds.lora.rank and config.algo.kl.init_coef:
                passes += 1  # the policy without its adapters is the reference
        once = speed.scoring_seconds(role, cluster, tokens=tokens, length=config.data.max_len)
        seconds += passes * once
    return seconds
