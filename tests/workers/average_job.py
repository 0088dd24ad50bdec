"""One rank of the weight-averaging test, which takes three optimizer steps.

A worker that resumes from a checkpoint repeats the last step.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from openrlhf.config.flags import amend
from openrlhf.config.machine import world_size
from openrlhf.config.shared import DeepSpeedConfig, LoraConfig
from openrlhf.data.tokenizer import get_tokenizer
from openrlhf.trainers.update_plan import plan_update
from openrlhf.training.gathered import exported_parameters, full_parameters
from openrlhf.training.layout import RankLayout
from openrlhf.training.strategy import Strategy
from openrlhf.workers.base import MicroBatchLimits
from openrlhf.workers.policy import PolicyUpdate, PolicyWorker
from tests.loading import load_spec
from tests.workers.policy_job import BATCH_SIZE, LENGTHS, Policy, batch, role_settings

BETA = 0.75


def weights(policy: PolicyWorker) -> dict[str, torch.Tensor]:
    """Return the averaged weights, which are the fp32 master weights in bfloat16 training."""
    if policy.engine.changes and not policy.engine.partial:
        buckets = exported_parameters(policy.engine, 1 << 14, masters=True)
        return {name: tensor.clone() for bucket in buckets for name, tensor in bucket}
    return {
        name: tensor.clone()
        for bucket in full_parameters(policy.engine, 1 << 14)
        for name, tensor in bucket
    }


def run(stage: int, dtype: str, lora: LoraConfig, model: str, out: str) -> list[dict[str, Any]]:
    """Return the initial weights and the weights after each step.

    The exports of the uninterrupted run and of the resumed run are written to `out`.
    """
    ds = DeepSpeedConfig(zero_stage=stage, param_dtype=dtype)
    strategy = Strategy(ds, RankLayout.from_flags(ds, processes=world_size()), seed=0)
    load = load_spec(path=model, param_dtype=dtype, attention="sdpa", packing=True, lora=lora)
    settings = role_settings(load, MicroBatchLimits(size=2))
    averaged = amend(settings.config, {"train.enable_ema": True, "train.ema_beta": BETA})
    settings = replace(settings, config=averaged)
    plan = plan_update(LENGTHS, slices=strategy.dp_size, batch_size=BATCH_SIZE, epochs=1, seed=0)[
        strategy.rank
    ]
    rows = batch().select(plan.rows)
    assert rows.advantages is not None
    poisoned = replace(rows, advantages=rows.advantages * torch.nan)

    policy = Policy(strategy, settings)
    path = [weights(policy)]
    for number, step in enumerate(plan.steps):
        if number == 2:
            # This step is skipped because its gradient is not finite.
            policy.update(PolicyUpdate(experience=poisoned, steps=[step], kl_coef=0.0))
            policy.save_checkpoint(f"{out}/checkpoint", "global_step2")
        policy.update(PolicyUpdate(experience=rows, steps=[step], kl_coef=0.0))
        path.append(weights(policy))
    policy.export(get_tokenizer(model), f"{out}/whole")
    after = weights(policy)
    # The export does not change the policy.
    assert all(torch.equal(after[name], weight) for name, weight in path[-1].items())

    resumed = Policy(strategy, settings)
    resumed.load_checkpoint(f"{out}/checkpoint", "global_step2")
    resumed.update(PolicyUpdate(experience=rows, steps=[plan.steps[2]], kl_coef=0.0))
    resumed.export(get_tokenizer(model), f"{out}/resumed")
    return path


def main() -> None:
    """Run every case. Arguments: model, output folder, then cases such as `zero3-fp32-lora`."""
    model, out, *cases = sys.argv[1:]
    for case in cases:
        stage, dtype, *adapter = case.removeprefix("zero").split("-")
        path = run(int(stage), dtype, LoraConfig(rank=4 * len(adapter)), model, f"{out}/{case}")
        if torch.distributed.get_rank() == 0:
            torch.save(path, Path(out) / case / "path.pt")
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
