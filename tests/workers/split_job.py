"""One rank of the split tests: runs one policy update for every layout and objective."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import product

import torch

from openrlhf.config.algorithm import AdvantageConfig, AlgoConfig, LossConfig
from openrlhf.config.learning import ActorConfig
from openrlhf.core.batches import Experience
from openrlhf.observability.metrics import values
from tests.loading import load_spec
from tests.workers.policy_job import (
    ACTOR,
    ALGO,
    Policy,
    batch,
    limits_of,
    role_settings,
    strategy_of,
    update,
    weights_of,
)

OBJECTIVES = list(product(("ppo", "gspo", "cispo"), ("token", "sequence", "constant")))
# A row's mean ratio is closer to 1 than its tokens' ratios.
# GSPO therefore needs a narrower range to clip as often.
CLIPS = {"ppo": 0.2, "gspo": 0.05, "cispo": 0.2}
# Bounds of π_old ÷ π_rollout, whose log is −0.2 ± 0.3 for each of a row's (about five) tokens.
CORRECTIONS = {
    "ppo": AdvantageConfig(
        is_correction_level="token",
        is_correction_mode="clip",
        is_correction_threshold=(0.0, 0.9),
    ),
    # The ratio of GSPO is π_θ / π_rollout with a correction.
    "gspo": AdvantageConfig(is_correction_level="seq", is_correction_threshold=(0.75, 0.9)),
    "cispo": AdvantageConfig(
        is_correction_level="seq",
        is_correction_gating="binary_kl",
        is_correction_threshold=(0.0, 0.0012),
    ),
}


def objective_of(loss: str, aggregation: str) -> tuple[ActorConfig, AlgoConfig]:
    actor = replace(
        ACTOR, policy_loss_type=loss, eps_clip_low_high=(CLIPS[loss], 1.5 * CLIPS[loss])
    )
    return actor, replace(
        ALGO, advantage=CORRECTIONS[loss], loss=LossConfig(aggregation=aggregation)
    )


def experience() -> Experience:
    """Return the worker tests' batch, with the rollout log-probabilities also used as log π_ref."""
    rows = batch()
    return replace(rows, ref_logprobs=rows.rollout_logprobs)


def main() -> None:
    """Run every layout.

    Arguments: model folder, output file, then layouts such as `zero2-rows3-packed-gspo-sequence`.
    """
    model, out, *layouts = sys.argv[1:]
    results = {}
    for layout in layouts:
        stage, limit, shape, loss, aggregation = layout.split("-")
        strategy = strategy_of(stage)
        load = load_spec(
            path=model, param_dtype="fp32", attention="sdpa", packing=shape == "packed"
        )
        limits = replace(limits_of(limit), packed=load.ds.packing_samples)
        policy = Policy(strategy, role_settings(load, limits, *objective_of(loss, aggregation)))
        metrics = update(policy, experience())
        results[layout] = {"metrics": values(metrics), "weights": weights_of(policy)}
    if torch.distributed.get_rank() == 0:
        torch.save(results, out)
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
