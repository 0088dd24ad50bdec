"""Measures one training step on long sequences that are split over a ring of ranks.

`python -m benchmarks.long_context` trains a model with 2 million parameters on sequences of 32,768
tokens with 1, 2 and 4 ranks. The benchmark prints the loss, the gradient norm, the increase from a
rank's memory before the step to its peak, and the duration in seconds.

With `--task sft`, the step trains on one sequence. With `--task grpo`, the reference model scores a
group of two recorded episodes, and the policy worker then takes a GRPO step on the group. The
episodes consist of random tokens, because generating episodes on a CPU would take hours.
"""

import argparse
import multiprocessing
import resource
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from openrlhf.algorithms.supervised_losses import token_nll
from openrlhf.config.optimizer import OptimizerConfig
from openrlhf.config.options import parse_config
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.shared import DeepSpeedConfig, LoadingConfig
from openrlhf.core.batches import Experience, TokenRows, offsets_of
from openrlhf.core.trajectory import Prompt, StopReason, Trajectory
from openrlhf.launch import settings
from openrlhf.models.loading import LoadSpec
from openrlhf.models.policy import PolicyModel
from openrlhf.observability.metrics import values
from openrlhf.trainers.experience_maker import ExperienceMaker
from openrlhf.training.engine import TrainEngine
from openrlhf.training.layout import RankLayout
from openrlhf.training.strategy import Strategy
from openrlhf.units import MIB
from openrlhf.workers.base import RoleSettings
from openrlhf.workers.frozen import ReferenceWorker
from openrlhf.workers.policy import PolicyUpdate, PolicyWorker
from tests.ranks import fork_ranks

VOCABULARY = 2048
PROMPT_TOKENS = 1024


class Step(NamedTuple):
    """The result of a step on one rank."""

    loss: float
    grad_norm: float
    peak_mib: float
    seconds: float


def save_model(path: Path) -> None:
    """Save a random model with 2 million parameters."""
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
    AutoModelForCausalLM.from_config(config).save_pretrained(path)


def resident_peak() -> float:
    """Return this process's peak resident memory so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MIB


def strategy_of(ds: DeepSpeedConfig, ranks: int) -> Strategy:
    """Return this rank's strategy for a ring of all ranks."""
    return Strategy(ds, RankLayout.from_flags(ds, processes=ranks), seed=0)


def sft_step(ranks: int, tokens: int, model: str) -> Callable[[], tuple[float, float]]:
    """Return a function that takes an SFT step, and returns its loss and gradient norm."""
    loading = LoadingConfig(param_dtype="fp32", packing_samples=True, attn_implementation="sdpa")
    ds = DeepSpeedConfig(
        zero_stage=2, param_dtype="fp32", packing_samples=True, ring_attn_size=ranks
    )
    engine = TrainEngine(
        strategy_of(ds, ranks),
        lambda: PolicyModel.load(LoadSpec(path=model, ds=loading)),
        OptimizerConfig(max_norm=0.0),
        total_steps=2,
    )
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

    def step() -> tuple[float, float]:
        result = engine.optimize(
            [row],
            counts=lambda micro: {"tokens": float(micro.loss_mask.sum())},
            loss=loss,  # pyright: ignore[reportArgumentType]
        )
        return losses[0], result.grad_norm

    return step


def recorded_group(tokens: int) -> Experience:
    """Return two episodes of `tokens` tokens with the same prompt; one of them is rewarded."""
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(0, VOCABULARY, (PROMPT_TOKENS,), generator=generator).tolist()
    length = tokens - PROMPT_TOKENS
    episodes: list[Trajectory] = []
    for number, reward in enumerate((1.0, 0.0)):
        response = torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()
        episodes.append(
            Trajectory(
                tokens=prompt + response,
                action_mask=[False] * PROMPT_TOKENS + [True] * length,
                rollout_logprobs=[0.0] * tokens,
                prompt=Prompt(index=0, text="", tokens=prompt),
                sample_index=number,
                stop_reason=StopReason.STOP,
                reward=reward,
            )
        )
    return Experience.from_trajectories(episodes)


def grpo_step(ranks: int, tokens: int, model: str) -> Callable[[], tuple[float, float]]:
    """Return a function that takes a GRPO step, and returns its loss and gradient norm."""
    flags = (
        f"--actor.model_name_or_path {model} --data.prompt_dataset recorded --reward.remote_url "
        f"{__file__} --algo.advantage.estimator group_norm --rollout.n_samples_per_prompt 2 "
        f"--rollout.batch_size 1 --train.batch_size 2 --train.micro_batch_size 1 "
        f"--rollout.micro_batch_size 1 --data.max_len {tokens} --ds.param_dtype fp32 "
        f"--algo.kl.use_loss --algo.kl.estimator k2 --ds.packing_samples "
        f"--actor.num_gpus_per_node {ranks} --ref.num_gpus_per_node {ranks} "
        f"--ds.ring_attn_size {ranks} --actor.max_norm 0"
    )
    config = parse_config(PPOConfig, flags.split(), command="train_ppo_ray")
    strategy = strategy_of(config.ds, ranks)
    policy = PolicyWorker(strategy, settings.trained_settings(config, model, 2))
    reference = ReferenceWorker(
        strategy, RoleSettings(config=config, load=settings.load_spec(config, model))
    )
    recorded = recorded_group(tokens)
    # The behavior policy of the recorded episodes is a uniform distribution.
    uniform = -torch.full((recorded.num_tokens,), float(VOCABULARY)).log()
    recorded = replace(recorded, rollout_logprobs=uniform, old_logprobs=uniform)

    def step() -> tuple[float, float]:
        scored = replace(recorded, ref_logprobs=reference.logprobs(recorded.targets()))
        experience, _ = ExperienceMaker(config).credit(scored)
        job = PolicyUpdate(experience=experience, steps=[[0, 1]], kl_coef=0.1)
        metrics = values(policy.update(job))
        return metrics["train/policy_loss"], metrics["train/actor_grad_norm"]

    return step


STEPS = {"sft": sft_step, "grpo": grpo_step}


def train(task: str, ranks: int, tokens: int, model: str, results: Connection) -> None:
    """Take one step as one rank. Only rank 0 sends its result."""
    step = STEPS[task](ranks, tokens, model)
    before = resident_peak()
    start = time.monotonic()
    loss, grad_norm = step()
    found = Step(loss, grad_norm, resident_peak() - before, time.monotonic() - start)
    if torch.distributed.get_rank() == 0:
        results.send(found)


def main() -> None:
    """Run the benchmark, and print a row for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=sorted(STEPS), default="sft")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("ranks | loss | gradient norm | peak memory of a rank (MiB) | seconds")
    with TemporaryDirectory() as folder:
        save_model(Path(folder))
        for ranks in options.ranks:
            receiving, sending = multiprocessing.Pipe(duplex=False)
            fork_ranks(ranks, train, options.task, ranks, options.tokens, folder, sending)
            step: Step = receiving.recv()
            print(
                f"{ranks} | {step.loss:.6f} | {step.grad_norm:.6f} | {step.peak_mib:.0f} | "
                f"{step.seconds:.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
