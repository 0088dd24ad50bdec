"""One rank of the split tests: the policy takes an update in every layout and with every objective asked for."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import product

import torch

from openrlhf.algorithms.corrections import Correction
from openrlhf.algorithms.policy_losses import Clip
from openrlhf.batches import Experience
from openrlhf.models.loading import LoadSpec
from openrlhf.observability.metrics import values
from openrlhf.workers.policy import Objective, PolicyWorker
from tests.workers.policy_job import OBJECTIVE, batch, limits_of, policy_settings, strategy_of, update, weights_of

OBJECTIVES = list(product(("ppo", "gspo", "cispo"), ("token", "sequence", "constant")))
# Means over a row are closer to 1 than its tokens' ratios: a narrower range clips as many.
CLIPS = {"ppo": 0.2, "gspo": 0.05, "cispo": 0.2}
# Of π_old ÷ π_rollout, whose logarithm is −0.2 ± 0.3 for each of about five tokens.
CORRECTIONS = {
    "ppo": Correction(level="token", mode="truncate", low=0.5, high=0.9),
    "gspo": Correction(level="geometric", mode="mask", low=0.75, high=0.9),
    "cispo": Correction(level="sequence", mode="clip", low=0.3, high=0.6),
}


def objective_of(loss: str, aggregation: str) -> Objective:
    return replace(
        OBJECTIVE,
        policy_loss=loss,
        clip=Clip(low=CLIPS[loss], high=1.5 * CLIPS[loss]),
        correction=CORRECTIONS[loss],
        aggregation=aggregation,
    )


def experience() -> Experience:
    """The batch of the worker tests, with the engine's log-probabilities for the reference's."""
    rows = batch()
    return rows.with_columns(ref_logprobs=rows.rollout_logprobs)


def main() -> None:
    """Arguments: model folder, output file, then layouts like `zero2-rows3-packed-gspo-sequence`."""
    model, out, *layouts = sys.argv[1:]
    results = {}
    for layout in layouts:
        stage, limit, shape, loss, aggregation = layout.split("-")
        strategy = strategy_of(stage)
        load = LoadSpec(path=model, param_dtype="fp32", attention="sdpa", packing=shape == "packed")
        policy = PolicyWorker(strategy, policy_settings(load, limits_of(limit), objective_of(loss, aggregation)))
        metrics = update(policy, experience())
        results[layout] = {"metrics": values(metrics), "weights": weights_of(policy)}
    if torch.distributed.get_rank() == 0:
        torch.save(results, out)
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
