"""A benchmark of one SFT step on a long sequence that is split over a ring of ranks.

`python -m benchmarks.long_context` trains a model with 2 million parameters on one sequence of
32,768 tokens with 1, 2 and 4 ranks. It prints the loss, the gradient norm, how far a rank's peak
memory exceeds its memory before the step, and the duration in seconds.
"""

import argparse
import multiprocessing
import resource
import time
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from openrlhf.algorithms.supervised_losses import token_nll
from openrlhf.config.shared import DeepSpeedConfig, OptimizerConfig
from openrlhf.core.batches import TokenRows, offsets_of
from openrlhf.models.packed_attention import NAME
from openrlhf.models.policy import PolicyModel
from openrlhf.training.engine import TrainEngine
from openrlhf.training.layout import RankLayout
from openrlhf.training.strategy import Strategy
from tests.ranks import fork_ranks

VOCABULARY = 2048
MIB = 2**20


class Step(NamedTuple):
    """The result of a step on one rank."""

    loss: float
    grad_norm: float
    peak_mib: float
    seconds: float


def make_model() -> PolicyModel:
    """Return a random model with 2 million parameters, which is the same in every process."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1 << 17,
    )
    hf = AutoModelForCausalLM.from_config(config, attn_implementation=NAME)
    return PolicyModel(hf, packing=True)


def resident_peak() -> float:
    """Return this process's peak resident memory so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MIB


def train(ranks: int, tokens: int, results: Connection) -> None:
    """Take one step as one rank. Rank 0 sends its result."""
    ds = DeepSpeedConfig(
        zero_stage=2, param_dtype="fp32", packing_samples=True, ring_attn_size=ranks
    )
    strategy = Strategy(ds, RankLayout.from_flags(ds, processes=ranks), seed=0)
    engine = TrainEngine(strategy, make_model, OptimizerConfig(max_norm=0.0), total_steps=2)
    drawn = torch.randint(0, VOCABULARY, (tokens,), generator=torch.Generator().manual_seed(1))
    targets = torch.ones(tokens, dtype=torch.bool)
    targets[0] = False
    row = TokenRows(tokens=drawn, offsets=offsets_of([tokens]), loss_mask=targets)
    losses: list[float] = []

    def loss(micro: TokenRows, totals: dict[str, float]) -> tuple[torch.Tensor, dict[str, float]]:
        scores = engine(micro.tokens, micro.offsets, micro.loss_mask)
        summed = token_nll(scores.logprobs, micro.loss_mask).sum()
        losses.append(float(summed.detach()) / totals["tokens"])
        return summed / totals["tokens"], {}

    before = resident_peak()
    start = time.monotonic()
    result = engine.optimize(
        [row],
        counts=lambda micro: {"tokens": float(micro.loss_mask.sum())},
        loss=loss,  # pyright: ignore[reportArgumentType]
    )
    if strategy.is_main:
        results.send(
            Step(losses[0], result.grad_norm, resident_peak() - before, time.monotonic() - start)
        )


def main() -> None:
    """Run the benchmark, and print a row for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("ranks | loss | gradient norm | peak memory of a rank (MiB) | seconds")
    for ranks in options.ranks:
        receiving, sending = multiprocessing.Pipe(duplex=False)
        fork_ranks(ranks, train, ranks, options.tokens, sending)
        step: Step = receiving.recv()
        print(
            f"{ranks} | {step.loss:.6f} | {step.grad_norm:.6f} | {step.peak_mib:.0f} | "
            f"{step.seconds:.1f}"
        )


if __name__ == "__main__":
    main()
