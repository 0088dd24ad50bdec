"""One rank of the worker tests: policy and reference score a batch, and the policy is updated.

The rank repeats these steps for every layout given as an argument.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from openrlhf.config.algorithm import AdvantageConfig, AlgoConfig, KLConfig, PtxConfig
from openrlhf.config.learning import ActorConfig, RLDeepSpeedConfig, RLFlags, RLTrainConfig
from openrlhf.config.machine import world_size
from openrlhf.config.optimizer import AdamConfig
from openrlhf.config.rollout import RolloutConfig, VLLMConfig
from openrlhf.config.shared import DeepSpeedConfig
from openrlhf.core.batches import Experience, Layout, TokenRows, offsets_of
from openrlhf.data.tokenizer import get_tokenizer
from openrlhf.models.loading import LoadSpec
from openrlhf.observability.metrics import merge_all, values
from openrlhf.trainers.update_plan import distribute, plan_update
from openrlhf.training.engine import Metrics
from openrlhf.training.gathered import full_parameters
from openrlhf.training.layout import RankLayout
from openrlhf.training.strategy import Strategy
from openrlhf.workers.base import MicroBatchLimits, RoleSettings
from openrlhf.workers.frozen import ReferenceWorker
from openrlhf.workers.policy import PolicyUpdate, PolicyWorker
from tests.loading import load_spec

LENGTHS = [5, 9, 4, 12, 7, 3, 10, 6, 8]
BATCH_SIZE = 4  # 4, 4 and 1 rows per step: with two ranks, one rank has no row in the last step
TEMPERATURE = 0.8
KL_COEF, ENTROPY_COEF, PTX_COEF, CLIP = 0.1, 0.05, 0.3, 0.2
BAND = (0.7, 0.95)  # bounds of π_old ÷ π_rollout, whose logarithm is −0.2 ± 0.3 here
MAX_RESPONSE = 16  # the divisor L in constant aggregation
# Pretraining text. With two ranks, one rank has a single row.
TEXTS = [[5, 9, 7, 30, 11], [12, 8], [40, 41, 42, 43, 44, 45, 46]]
# A large epsilon makes AdamW nearly linear in the gradient.
# Weights can therefore be compared as tightly as gradients.
ACTOR = ActorConfig(
    adam=AdamConfig(lr=1.0, eps=1.0),
    lr_scheduler="constant",
    lr_warmup_ratio=0.0,
    max_norm=0.5,
    eps_clip_low_high=(CLIP, CLIP),
    entropy_coef=ENTROPY_COEF,
)
ALGO = AlgoConfig(
    advantage=AdvantageConfig(
        is_correction_level="token", is_correction_mode="clip", is_correction_threshold=BAND
    ),
    kl=KLConfig(estimator="k3", use_loss=True),
    ptx=PtxConfig(coef=PTX_COEF),
)


def batch() -> Experience:
    """Return nine rows of different lengths with gaps in their action masks.

    The rows are the same in every process. The three rows of a group have a common prefix.
    """
    draw = torch.Generator().manual_seed(0)
    tokens, rows = sum(LENGTHS), len(LENGTHS)
    offsets = offsets_of(LENGTHS)
    mask = torch.rand(tokens, generator=draw) < 0.7
    mask[offsets[1:] - 1] = True
    mask[offsets[:-1]] = False
    ids = torch.randint(4, 60, (tokens,), generator=draw)
    for row, start in enumerate(offsets[:-1].tolist()):
        first = int(offsets[row - row % 3])
        ids[start : start + 3] = ids[first : first + 3]
    return Experience(
        tokens=ids,
        offsets=offsets,
        action_mask=mask,
        rollout_logprobs=torch.full((tokens,), -4.0),
        group_ids=torch.arange(rows) // 3,
        rewards=torch.zeros(rows),
        truncated=torch.zeros(rows, dtype=torch.bool),
        advantages=torch.randn(tokens, generator=draw),
        old_logprobs=-4.2 + 0.3 * torch.randn(tokens, generator=draw),
    )


def text(rows: list[int]) -> TokenRows:
    """Return this rank's share of `TEXTS`. Every token except the first is a target."""
    tokens = [TEXTS[row] for row in rows]
    return TokenRows.from_lists(
        tokens, [[place > 0 for place in range(len(row))] for row in tokens]
    )


def score(worker: Any, strategy: Strategy, experience: Experience) -> torch.Tensor:
    """Compute a column as the experience maker does: each rank scores its share of the rows."""
    parts = distribute(LENGTHS, range(len(LENGTHS)), strategy.dp_size)
    column = torch.zeros(experience.num_tokens)
    mine = worker.logprobs(experience.targets().select(parts[strategy.rank]))
    for rows, scored in zip(parts, strategy.gather(mine), strict=True):
        place = Layout.of(experience.offsets, torch.tensor(rows))
        column[place.positions[place.real]] = scored
    return column


def role_settings(
    load: LoadSpec, limits: MicroBatchLimits, actor: ActorConfig = ACTOR, algo: AlgoConfig = ALGO
) -> RoleSettings:
    """Return settings with the same limits for forward passes with and without gradient."""
    tokens = limits.max_tokens
    config = RLFlags(
        actor=actor,
        algo=algo,
        rollout=RolloutConfig(
            temperature=TEMPERATURE,
            max_new_tokens=MAX_RESPONSE,
            micro_batch_size=limits.size,
            max_tokens_per_gpu=tokens,
        ),
        train=RLTrainConfig(
            micro_batch_size=limits.size,
            dynamic_batch_enable=tokens is not None,
            max_tokens_per_gpu=tokens or 1,
        ),
        ds=RLDeepSpeedConfig(packing_samples=limits.packed),
        vllm=VLLMConfig(dtype="fp32"),
    )
    return RoleSettings(config=config, load=load, total_steps=3)


class Policy(PolicyWorker):
    """A policy with small buckets, so that exports and publications need several buckets."""

    bucket_bytes = 1 << 14  # pyright: ignore[reportAssignmentType]


def limits_of(name: str) -> MicroBatchLimits:
    """Parse micro-batch limits: `rows3` is three rows, `tokens20` is at most 20 tokens."""
    if name.startswith("tokens"):
        return MicroBatchLimits(size=1, max_tokens=int(name.removeprefix("tokens")))
    return MicroBatchLimits(size=int(name.removeprefix("rows")))


def strategy_of(name: str) -> Strategy:
    """Parse a strategy: `zero2` means float32 under ZeRO stage 2."""
    ds = DeepSpeedConfig(zero_stage=int(name.removeprefix("zero")), param_dtype="fp32")
    return Strategy(ds, RankLayout.from_flags(ds, processes=world_size()), seed=0)


def update(policy: PolicyWorker, experience: Experience) -> Metrics:
    """Update the policy with each rank's share of the rows, and return the metrics of all ranks."""
    strategy = policy.strategy
    plans = plan_update(LENGTHS, slices=strategy.dp_size, batch_size=BATCH_SIZE, epochs=1, seed=0)
    plan = plans[strategy.rank]
    texts = [
        text(
            distribute([len(row) for row in TEXTS], range(len(TEXTS)), strategy.dp_size)[
                strategy.rank
            ]
        )
    ]
    job = PolicyUpdate(
        experience=experience.select(plan.rows),
        steps=plan.steps,
        kl_coef=KL_COEF,
        pretraining=texts * len(plan.steps),
    )
    return merge_all(strategy.gather(policy.update(job)))


def weights_of(policy: PolicyWorker) -> dict[str, torch.Tensor]:
    """Return the weights that a publication would send."""
    return {
        name: tensor.clone()
        for bucket in full_parameters(policy.engine, 1 << 14)
        for name, tensor in bucket
    }


def run(strategy: Strategy, model: str, limits: MicroBatchLimits, packing: bool) -> dict[str, Any]:
    """Score the batch before and after an update, and return scores, weights and metrics."""
    load = load_spec(path=model, param_dtype="fp32", attention="sdpa", packing=packing)
    settings = role_settings(load, limits)
    policy, reference = Policy(strategy, settings), ReferenceWorker(strategy, settings)
    experience = batch()
    before = score(policy, strategy, experience)
    experience = replace(experience, ref_logprobs=score(reference, strategy, experience))
    metrics = update(policy, experience)
    return {
        "before": before,
        "reference": experience.ref_logprobs,
        "after": score(policy, strategy, experience),
        "reference after": score(reference, strategy, experience),
        "metrics": values(metrics),
        "weights": weights_of(policy),
        "policy": policy,
    }


def main() -> None:
    """Run every layout. Arguments: model, output folder, layouts such as `zero2-rows3-packed`."""
    model, out, *layouts = sys.argv[1:]
    results = {}
    for layout in layouts:
        stage, limit, shape = layout.split("-")
        strategy = strategy_of(stage)
        packed = shape == "packed"
        result = run(strategy, model, replace(limits_of(limit), packed=packed), packed)
        result.pop("policy").export(get_tokenizer(model), f"{out}/{layout}")
        results[layout] = result
    if strategy.is_main:
        torch.save(results, Path(out) / "results.pt")
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
