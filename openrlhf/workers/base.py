"""What every role shares: cutting rows into micro-batches, forwards without gradient, settings."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from openrlhf.data.batching import micro_batches
from openrlhf.distributed.strategy import Strategy
from openrlhf.experience import Experience, Layout


@dataclass(frozen=True, kw_only=True)
class MicroBatchLimits:
    """How many rows, or how many tokens, go through a model at once. `max_tokens` wins where it is set."""

    size: int
    max_tokens: int | None = None

    def cut(self, lengths: Tensor) -> list[list[int]]:
        """Row numbers of each micro-batch, for rows of `lengths` tokens; together they are all rows, once."""
        return micro_batches(
            lengths.tolist(),
            size=None if self.max_tokens else self.size,
            max_tokens=self.max_tokens,
        )


def score_tokens(
    model: nn.Module,
    experience: Experience,
    limits: MicroBatchLimits,
    strategy: Strategy,
    *,
    temperature: float,
) -> Tensor:
    """log π of every sampled token, (N,) on the CPU, 0 elsewhere; without gradient.

    Under ZeRO 3 a forward is collective: every rank runs as many micro-batches as the rank that has most.
    """
    parts = limits.cut(experience.lengths)
    rounds = (
        int(strategy.all_reduce([len(parts)], "max")[0])
        if strategy.config.zero_stage == 3
        else len(parts)
    )
    scored = torch.zeros(experience.num_tokens)
    with torch.no_grad():
        for turn in range(rounds):
            rows = parts[min(turn, len(parts) - 1)]
            micro = experience.select(rows).to(strategy.device)
            logprobs = model(
                micro.tokens, micro.offsets, micro.action_mask, temperature
            ).logprobs.cpu()
            place = Layout.of(experience.offsets, torch.tensor(rows))
            scored[place.positions[place.real]] = logprobs
    return scored
