"""Finds the nearest settings with which a run fits, and the longest sequences that fit.

A change is a flag with values from the mildest to the strongest. Changes that hardly slow the run
down come first, followed by changes that slow it down more, state on a drive, and finally changes
to what is trained.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from openrlhf.config.flags import amend, flags_of, value_at
from openrlhf.config.supervised import SupervisedConfig
from openrlhf.planning.cluster import Cluster
from openrlhf.planning.plan import Plan, make_plan
from openrlhf.planning.shapes import SplitError

LENGTH_STEP = 128  # tokens
LONGEST = 1 << 20
LORA_RANK = 32
ENGINE_SHARE = "vllm.gpu_memory_utilization"
ENGINE_SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
DRIVE = "/mnt/nvme"  # an example of a folder on a drive
OPTIMIZER_ON_DRIVE = {"ds.zero_stage": 3, "ds.nvme_path": DRIVE}
ALL_ON_DRIVE = OPTIMIZER_ON_DRIVE | {"ds.param_offload": "nvme"}

# Flags that are changed together, with one set of values per strength, mildest first.
Change = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Flags with which a run fits, and the resulting plan."""

    flags: Mapping[str, Any]
    plan: Plan

    def typed(self, config: Any) -> str:
        """Return the flags as typed on a command line; empty if there are none."""
        flags = flags_of(type(config))
        words: list[str] = []
        for path, value in self.flags.items():
            words.append(flags[path].typed(value))
        return " ".join(words)


def nearest_fit(config: Any, cluster: Cluster, *, thorough: bool = True) -> Advice | None:
    """Return the fewest and cheapest changes with which the run fits on the cluster, or None.

    Single changes and then pairs of changes are tried, cheapest first. If no pair is enough, all
    changes are made. Then every change that the run does not need in order to fit is undone,
    starting with the most expensive change. Without `thorough`, single changes and pairs are not
    tried. A drive is suggested only on a machine without GPUs, if no other change makes the run
    fit; on GPUs, it saves no more device memory than CPU memory does (see `on_drive`). Adapters are
    suggested only if no change makes full training fit on this cluster.
    """
    search = Search(config, cluster)
    changes = [change for change in _changes(config, cluster) if change]
    chosen = search.fewest(changes, thorough=thorough)
    if chosen is None and not cluster.on_gpus:
        drive = [OPTIMIZER_ON_DRIVE, ALL_ON_DRIVE]
        chosen = search.fewest([*changes, drive], thorough=thorough)
    if chosen is None and not config.ds.lora.rank:
        adapter = {"ds.lora.rank": LORA_RANK}
        changes.append([adapter, adapter | {"ds.load_in_4bit": True}])
        chosen = search.fewest(changes, thorough=thorough)
    if chosen is None:
        return None
    return search.milder(chosen)


def on_drive(config: Any, cluster: Cluster, nearest: Advice) -> Advice | None:
    """Return the flags of `nearest` with state on a drive, or None if that saves no CPU memory."""
    flags = {path: value for path, value in nearest.flags.items() if path != "ds.adam_offload"}
    advised = amend(config, dict(nearest.flags))
    drive = OPTIMIZER_ON_DRIVE if advised.ds.param_offload == "none" else ALL_ON_DRIVE
    found = Search(config, cluster).trial([flags, drive])
    if found is None or found.plan.host_bytes >= nearest.plan.host_bytes:
        return None
    return found


class Search:
    """Search for flags with which a run fits on a cluster."""

    def __init__(self, config: Any, cluster: Cluster) -> None:
        self.config = config
        self.cluster = cluster
        self.violations = set(config.check())

    def trial(self, values: Sequence[Mapping[str, Any]]) -> Advice | None:
        """Return the plan with these flags if it fits and violates no additional rule."""
        flags: dict[str, Any] = {}
        for each in values:
            flags |= each
        for share in ENGINE_SHARES:
            tried = dict(flags)
            if ENGINE_SHARE in flags:
                tried[ENGINE_SHARE] = share
            changed = amend(self.config, tried)
            try:
                plan = make_plan(changed, self.cluster)
            except SplitError:
                return None
            if plan.fits and not set(changed.check()) - self.violations:
                return Advice(flags=tried, plan=plan)
            if ENGINE_SHARE not in flags:
                break
        return None

    def fewest(self, changes: Sequence[Change], *, thorough: bool) -> Sequence[Change] | None:
        """Return a small set of changes that, at full strength, make the run fit, or None."""
        if thorough:
            for count in (1, 2):
                # ordered by the most expensive change
                for places in sorted(combinations(range(len(changes)), count), key=max):
                    some = [changes[place] for place in places]
                    if self.trial([change[-1] for change in some]):
                        return some
        chosen = list(changes)
        if not self.trial([change[-1] for change in chosen]):
            return None
        for change in reversed(changes):
            rest = [kept for kept in chosen if kept is not change]
            if self.trial([kept[-1] for kept in rest]):
                chosen = rest
        return chosen

    def milder(self, changes: Sequence[Change]) -> Advice:
        """Return the mildest values of these changes that still make the run fit."""
        strongest = [change[-1] for change in changes]
        for place, change in enumerate(changes):
            for mild in change:
                tried = [*strongest]
                tried[place] = mild
                if self.trial(tried):
                    strongest = tried
                    break
        found = self.trial(strongest)
        assert found
        return found


def _changes(config: Any, cluster: Cluster) -> Iterator[Change]:
    """Yield the changes not yet made in this configuration, cheapest first; some may be empty."""
    is_rl = not isinstance(config, SupervisedConfig)
    ds = config.ds
    if is_rl:
        yield from _engine_changes(config, cluster)
    yield from _batch_changes(config)
    trained = "actor" if is_rl else "model"
    checkpointing = f"{trained}.gradient_checkpointing_enable"
    every = f"{trained}.gradient_checkpointing_every"
    if not value_at(config, checkpointing):
        yield [{checkpointing: True}]
    elif value_at(config, every) > 1:
        yield [{every: 1}]
    if not ds.packing_samples and ds.param_dtype != "fp32" and cluster.on_gpus:
        yield [{"ds.packing_samples": True}]
    for path in ("ref.offload", "reward.offload", "kd.teacher_offload"):
        if path in flags_of(type(config)) and not value_at(config, path):
            yield [{path: True}]
    ranks = cluster.devices
    if ds.zero_stage < 3 and ranks > 1:
        stages = range(max(1, ds.zero_stage) + 1, 4)
        yield [{"ds.zero_stage": stage} for stage in stages]
    if cluster.on_gpus and not ds.offloads_optimizer:
        values: dict[str, Any] = {"ds.adam_offload": True}
        if ds.zero_stage == 0:
            values["ds.zero_stage"] = 2
        yield [values]
    if cluster.on_gpus and ds.param_offload == "none":
        yield [{"ds.param_offload": "cpu", "ds.zero_stage": 3}]
    if ranks > 1 and ds.ring_attn_size == 1 and not ds.lora.rank:
        rings: list[dict[str, Any]] = []
        for size in (2, 4, 8):
            if ranks % (size * ds.tensor_parallel_size) == 0:
                rings.append({"ds.ring_attn_size": size, "ds.packing_samples": True})
        yield rings


def _batch_changes(config: Any) -> Iterator[Change]:
    """Yield smaller micro-batches."""
    train = config.train
    is_rl = not isinstance(config, SupervisedConfig)
    if is_rl and train.dynamic_batch_enable:
        budgets = [train.max_tokens_per_gpu // 2, train.max_tokens_per_gpu // 4]
        smaller = [budget for budget in budgets if budget >= config.data.max_len]
        names = ("train.max_tokens_per_gpu", "rollout.max_tokens_per_gpu")
        yield [dict.fromkeys(names, budget) for budget in smaller]
        return
    sizes: list[dict[str, int]] = []
    size = train.micro_batch_size
    while size > 1:
        size //= 2
        sizes.append({"train.micro_batch_size": size})
    yield sizes
    if is_rl and config.rollout.micro_batch_size > 1:
        yield [{"rollout.micro_batch_size": 1}]


def _engine_changes(config: Any, cluster: Cluster) -> Iterator[Change]:
    """Yield changes to engines: sleep mode, memory share on shared devices, and parallelism."""
    vllm, ds = config.vllm, config.ds
    if config.rollout.replay_dir or not cluster.on_gpus:
        return
    if config.hybrid:
        if not vllm.enable_sleep:
            yield [{"vllm.enable_sleep": True}]
        if not ds.enable_sleep and not ds.offloads_optimizer:
            yield [{"ds.enable_sleep": True, "ds.zero_stage": max(2, ds.zero_stage)}]
    yield [{ENGINE_SHARE: min(ENGINE_SHARES)}]  # `Search.trial` tries all shares
    devices = vllm.num_engines * vllm.devices
    if config.hybrid:
        devices = config.actor_ranks
    split: list[dict[str, Any]] = []
    size = 2 * vllm.tensor_parallel_size
    while size * vllm.pipeline_parallel_size <= min(devices, cluster.per_node):
        engines = devices // (size * vllm.pipeline_parallel_size)
        split.append({"vllm.tensor_parallel_size": size, "vllm.num_engines": engines})
        size *= 2
    yield split


def longest_length(config: Any, cluster: Cluster) -> int:
    """Return the largest --data.max_len that fits, a multiple of 128, or 0 if none fits.

    Memory grows with the length, so the limit is found by binary search.
    """

    def is_too_long(length: int) -> bool:
        return not make_plan(amend(config, {"data.max_len": length}), cluster).fits

    lengths = range(LENGTH_STEP, LONGEST + 1, LENGTH_STEP)
    return LENGTH_STEP * bisect_left(lengths, True, key=is_too_long)
