"""Runs GRPO in a single process to study the first optimizer steps.

A run uses the real policy worker and credit assignment with default flags, and Transformers as the
engine. A run on the demo task takes a few seconds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from examples.demo.run import HERE
from openrlhf.config.options import parse_config
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.shared import DeepSpeedConfig
from openrlhf.core.batches import Experience
from openrlhf.core.trajectory import Prompt, StopReason, Trajectory
from openrlhf.launch import settings
from openrlhf.observability.metrics import values
from openrlhf.trainers.experience_maker import ExperienceMaker
from openrlhf.trainers.update_plan import plan_update
from openrlhf.training.devices import free_port
from openrlhf.training.layout import RankLayout
from openrlhf.training.strategy import Strategy
from openrlhf.workers.base import RoleSettings
from openrlhf.workers.frozen import ReferenceWorker
from openrlhf.workers.policy import PolicyUpdate, PolicyWorker

PROMPTS, SAMPLES, OPTIMIZER_STEPS = 32, 8, 4  # per step
NEW_TOKENS, HELD_OUT, HELD_OUT_SAMPLES = 8, 400, 4


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A run's flags that differ from the defaults."""

    lr: float
    warmup: float  # as a fraction of the optimizer steps
    dtype: str
    steps: int  # number of batches, each of `OPTIMIZER_STEPS` optimizer steps


@dataclass(kw_only=True)
class Course:
    """The results of a run. Lists contain one number per step."""

    before: float = 0.0  # held-out pass@1
    after: float = 0.0
    solved: list[float] = field(default_factory=list[float])  # fraction of samples
    kl: list[float] = field(
        default_factory=list[float]
    )  # KL to the reference at the beginning of the step, in nats per token
    update_kl: list[float] = field(default_factory=list[float])
    update_size: list[float] = field(
        default_factory=list[float]
    )  # norm of the weight change relative to the norm of the weights


@cache
def strategy(dtype: str, seed: int) -> Strategy:
    """Return a strategy whose process group contains only this process."""
    world = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
    }
    os.environ.update(world | {"MASTER_PORT": os.environ.get("MASTER_PORT", str(free_port()))})
    return Strategy(DeepSpeedConfig(param_dtype=dtype), RankLayout(dp=1), seed=seed)


def course(task: Path, model: Path, setting: Setting, seed: int) -> Course:
    """Train the SFT model of a task for a few steps.

    The KL penalty is part of the reward; all other settings are the defaults.
    """
    batch = PROMPTS * SAMPLES
    flags = (
        f"--actor.model_name_or_path {model} --data.prompt_dataset {task}/prompts.jsonl "
        f"--data.label_key output --reward.remote_url {HERE}/reward.py "
        "--algo.advantage.estimator group_norm --data.max_len 32 "
        f"--rollout.n_samples_per_prompt {SAMPLES} --rollout.batch_size {PROMPTS} "
        f"--rollout.max_new_tokens {NEW_TOKENS} --train.batch_size {batch // OPTIMIZER_STEPS} "
        f"--train.micro_batch_size 64 --rollout.micro_batch_size 64 --actor.adam.lr {setting.lr} "
        f"--actor.lr_warmup_ratio {setting.warmup} --ds.param_dtype {setting.dtype}"
    )
    config = parse_config(PPOConfig, flags.split(), command="train_ppo_ray")
    ranks = strategy(setting.dtype, seed)
    policy = PolicyWorker(
        ranks, settings.trained_settings(config, str(model), setting.steps * OPTIMIZER_STEPS)
    )
    reference = ReferenceWorker(
        ranks, RoleSettings(config=config, load=settings.load_spec(config, str(model)))
    )
    maker = ExperienceMaker(config)
    engine = Engine(policy.engine.hf, AutoTokenizer.from_pretrained(model), seed)
    rows, held_out = (read(task / name) for name in ("prompts.jsonl", "held_out.jsonl"))
    seen = Course(before=engine.solved(held_out[:HELD_OUT], HELD_OUT_SAMPLES))
    for step in range(setting.steps):
        episodes = list(engine.play(rows[step * PROMPTS : (step + 1) * PROMPTS], SAMPLES))
        experience = Experience.from_trajectories(episodes)
        experience = replace(
            experience,
            old_logprobs=policy.logprobs(experience.targets()),
            ref_logprobs=reference.logprobs(experience.targets()),
        )
        experience, credit = maker.credit(experience)
        [plan] = plan_update(
            experience.lengths.tolist(),
            slices=1,
            batch_size=config.train.batch_size,
            epochs=1,
            seed=seed + step,
        )
        weights = flat_weights(policy.engine.hf)
        update = policy.update(
            PolicyUpdate(experience=experience.select(plan.rows), steps=plan.steps, kl_coef=0.0)
        )
        metrics = values(credit) | values(update)
        seen.solved.append(metrics["train/reward"])
        seen.kl.append(metrics["train/kl"])
        seen.update_kl.append(metrics["train/update_kl"])
        seen.update_size.append(
            float((flat_weights(policy.engine.hf) - weights).norm() / weights.norm())
        )
    seen.after = engine.solved(held_out[:HELD_OUT], HELD_OUT_SAMPLES)
    return seen


def flat_weights(hf: PreTrainedModel) -> Tensor:
    """Return all model weights as one float32 vector."""
    return torch.cat([weight.detach().float().flatten() for weight in hf.parameters()])


def read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Engine:
    """An engine that samples from a model's current weights at temperature 1.

    All prompts of the demo task have the same length.
    """

    def __init__(self, hf: PreTrainedModel, tokenizer: Any, seed: int) -> None:
        self.hf, self.tokenizer = hf, tokenizer
        self.generator = torch.Generator().manual_seed(seed)

    def solved(self, rows: Sequence[dict[str, str]], samples: int) -> float:
        """Return the fraction of correct responses."""
        rewards = [episode.reward or 0.0 for episode in self.play(rows, samples)]
        return sum(rewards) / len(rewards)

    def play(self, rows: Sequence[dict[str, str]], samples: int) -> Iterator[Trajectory]:
        """Generate episodes with reward 1 for the correct answer followed by the eos token."""
        prompts = [self.tokenizer(row["input"]).input_ids for row in rows]
        tokens, logprobs = self._sample(torch.tensor(prompts).repeat_interleave(samples, 0))
        for place, (sampled, scored) in enumerate(
            zip(tokens.tolist(), logprobs.tolist(), strict=True)
        ):
            row, prompt = rows[place // samples], prompts[place // samples]
            end = self.tokenizer.eos_token_id
            length = sampled.index(end) + 1 if end in sampled else len(sampled)
            yield Trajectory(
                tokens=prompt + sampled[:length],
                action_mask=[False] * len(prompt) + [True] * length,
                rollout_logprobs=[0.0] * len(prompt) + scored[:length],
                prompt=Prompt(index=place // samples, text=row["input"], tokens=prompt),
                sample_index=place % samples,
                stop_reason=StopReason.STOP if end in sampled else StopReason.LENGTH,
                reward=float(self.tokenizer.decode(sampled[:length]) == row["output"]),
            )

    @torch.no_grad()
    def _sample(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Sample tokens. Returns tokens and log-probabilities, each of shape (B, `NEW_TOKENS`)."""
        self.hf.eval()
        cache, sampled, scored = None, list[Tensor](), list[Tensor]()
        for _ in range(NEW_TOKENS):
            output: Any = self.hf(tokens, past_key_values=cache, use_cache=True)
            cache, table = (
                output.past_key_values,
                torch.log_softmax(output.logits[:, -1].float(), -1),
            )
            tokens = torch.multinomial(table.exp(), 1, generator=self.generator)
            sampled.append(tokens)
            scored.append(table.gather(1, tokens))
        self.hf.train()
        return torch.cat(sampled, 1), torch.cat(scored, 1)
