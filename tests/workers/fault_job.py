"""One rank of the fault tests, in which only the last rank has nonfinite losses and gradients."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from openrlhf.config.flags import amend
from openrlhf.core.batches import Experience
from openrlhf.models.loading import LoadSpec
from openrlhf.observability.metrics import values
from openrlhf.training.nonfinite import NonFiniteError
from openrlhf.training.strategy import Strategy
from openrlhf.workers.base import MicroBatchLimits, RoleSettings, Update
from openrlhf.workers.critic import CriticWorker
from openrlhf.workers.policy import PolicyUpdate, PolicyWorker
from tests.loading import load_spec
from tests.workers.policy_job import KL_COEF, Policy, batch, role_settings, strategy_of, weights_of

BROKEN = "hf.model.layers.1.mlp.up_proj.weight"
LIMITS = MicroBatchLimits(size=2, packed=True)  # with a size limit, rows keep their order
POISONED_ROW = 7  # the last rank's last row, in its second micro-batch
NAN = float("nan")


def poison(column: Tensor | None, value: float) -> Tensor:
    """Return a per-token column with `value` in one row."""
    assert column is not None
    column, offsets = column.clone(), batch().offsets
    column[offsets[POISONED_ROW] : offsets[POISONED_ROW + 1]] = value
    return column


def rows_of(strategy: Strategy) -> list[int]:
    return list(range(strategy.rank, batch().num_rows, strategy.dp_size))


def step(policy: PolicyWorker, experience: Experience) -> dict[str, float]:
    """Take one optimizer step over all rows, and return its metrics on this rank."""
    rows = rows_of(policy.strategy)
    job = PolicyUpdate(
        experience=experience.select(rows),
        steps=[list(range(len(rows)))],
        kl_coef=KL_COEF,
    )
    return values(policy.update(job))


def error_of(call: Callable[[], object], strategy: Strategy) -> list[str]:
    """Return each rank's error message."""
    try:
        call()
    except NonFiniteError as error:
        return strategy.gather(str(error))
    return strategy.gather("no error")


def settings_with(max_nonfinite: int, load: LoadSpec) -> RoleSettings:
    """Return settings that end a run after `max_nonfinite` consecutive skipped steps.

    The critic is initialized from the policy's model.
    """
    settings = role_settings(load, LIMITS)
    same = {"actor.model_name_or_path": load.path, "critic.model_name_or_path": load.path}
    return replace(
        settings, config=amend(settings.config, {"train.max_nonfinite": max_nonfinite, **same})
    )


def policy_faults(strategy: Strategy, load: LoadSpec) -> dict[str, Any]:
    """Skip one step, apply the next, then break one policy's losses and another's gradients."""
    policy, healthy = (Policy(strategy, settings_with(most, load)) for most in (2, 1))
    clean, broken = batch(), replace(batch(), advantages=poison(batch().advantages, NAN))
    step(healthy, clean)
    start = weights_of(policy)
    skipped = step(policy, broken)
    untouched = weights_of(policy)
    recovered = step(policy, clean)
    outcome = {
        "start": start,
        "untouched": untouched,
        "healthy": weights_of(healthy),
        "recovered": weights_of(policy),
        "counts": [metrics["train/nonfinite_steps"] for metrics in (skipped, recovered)],
        "skipped": skipped,
    }
    step(policy, broken)
    outcome["loss errors"] = error_of(lambda: step(policy, broken), strategy)
    outcome["in the end"] = weights_of(policy)

    step(healthy, clean)
    parameter = dict(healthy.engine.module.named_parameters())[BROKEN]
    parameter.register_hook(
        lambda gradient: gradient * NAN if strategy.rank == strategy.dp_size - 1 else gradient
    )
    outcome["gradient errors"] = [
        error_of(lambda: step(healthy, clean), strategy) for _ in range(2)
    ]
    return outcome


def critic_fault(strategy: Strategy, load: LoadSpec) -> list[str]:
    """Update the critic with infinite returns in one row. The first skipped step ends the run."""
    zeros = torch.zeros(batch().num_tokens)
    rows = rows_of(strategy)
    job = Update(
        experience=replace(batch(), values=zeros, returns=poison(zeros, float("inf"))).select(rows),
        steps=[list(range(len(rows)))],
    )
    critic = CriticWorker(strategy, settings_with(1, load))
    return error_of(lambda: critic.update(job), strategy)


def main() -> None:
    """Run every stage. Arguments: model folder, output file, then ZeRO stages such as `zero2`."""
    model, out, *stages = sys.argv[1:]
    results = {}
    for stage in stages:
        strategy = strategy_of(stage)
        load = load_spec(path=model, param_dtype="fp32", attention="sdpa", packing=True)
        results[stage] = policy_faults(strategy, load) | {
            "critic errors": critic_fault(strategy, load)
        }
    if torch.distributed.get_rank() == 0:
        torch.save(results, out)
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
