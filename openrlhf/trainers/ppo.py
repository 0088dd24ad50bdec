"""The on-policy loop. PPO, REINFORCE++, RLOO, GRPO and their kin are choices inside `credit` and the policy's objective."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from openrlhf.algorithms.kl import KLController
from openrlhf.checkpoints.manager import CheckpointManager
from openrlhf.checkpoints.manifest import Checkpoint, EngineLayout, RunState
from openrlhf.config.shared import CheckpointConfig
from openrlhf.distributed.worker_group import WorkerGroup, gather
from openrlhf.experience import Experience
from openrlhf.observability.metrics import Last, Mean, Metric, merge_all, values
from openrlhf.rollout.rewards import ErrorBudget
from openrlhf.trainers.experience_maker import ExperienceMaker
from openrlhf.trainers.publisher import WeightPublisher
from openrlhf.trainers.recorder import Recorder
from openrlhf.trainers.sources import SyncSource, evaluation_metrics
from openrlhf.trainers.update_plan import plan_update, rows_of_rank
from openrlhf.trajectory import Trajectory
from openrlhf.workers.policy import PolicyUpdate, PolicyWorker

Evaluate = Callable[[], list[Trajectory]]


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """What the loop itself needs to know. Built from the flags."""

    batch_size: int  # samples per optimizer step
    epochs: int  # passes over a rollout batch
    seed: int
    needs_groups: bool  # the estimator compares samples of a prompt: a lone one teaches nothing
    eval_steps: int  # ≤ 0: no evaluation while training
    eval_at_start: bool
    eval_samples: int  # the k of pass@k
    best_metric_key: str
    step_timeout: float  # seconds
    run_dir: str
    layout: EngineLayout  # of the policy's state, for the checkpoint


class PPOTrainer:
    """Holds the loop, and what hangs on each of its steps."""

    def __init__(
        self,
        source: SyncSource,
        maker: ExperienceMaker,
        policy: WorkerGroup,
        weights: WeightPublisher,
        *,
        kl: KLController,
        errors: ErrorBudget,
        evaluate: Evaluate | None,
        checkpoints: CheckpointManager,
        ckpt: CheckpointConfig,
        tokenizer: PreTrainedTokenizerBase,
        recorder: Recorder,
        settings: LoopSettings,
    ) -> None:
        self.source, self.maker, self.policy, self.weights = source, maker, policy, weights
        self.kl, self.errors, self.evaluate = kl, errors, evaluate
        self.checkpoints, self.ckpt, self.tokenizer = checkpoints, ckpt, tokenizer
        self.recorder, self.settings = recorder, settings
        self.step = 0
        self.best = BestMetric(settings.best_metric_key)
        self.timing: dict[str, Metric] = {}

    def fit(self) -> None:
        """Train until the prompts are used up, then export."""
        self.recorder.display.begin(self.source.total_steps, done=self.step)
        self.weights.publish(self.step)  # π_old ← π, also after a resume
        if self.settings.eval_at_start and self.step == 0:
            self.run_evaluation()
        for trajectories in self.timed("generation", self.source):  # τ ~ π_old
            experience, rollout = self.collect(trajectories)
            if not experience.num_samples:
                self.after_step(rollout)
                continue
            with self.clock("make_experience"):
                experience = self.maker.annotate(experience)  # log π_old, log π_ref
                experience, credit = self.maker.credit(experience)  # r_t, Â_t, Ĝ_t
            with self.clock("ppo_train"):
                update = self.improve(experience)  # π ← argmin of the objective
            with self.clock("broadcast"):
                self.weights.publish(self.step + 1)  # π_old ← π
            self.after_step(merge_all([rollout, credit, update]))
        self.export(self.ckpt.output_dir)

    def collect(self, trajectories: Sequence[Trajectory]) -> tuple[Experience, dict[str, Metric]]:
        """Drop what failed, count it, and flatten the rest. Raises RewardErrors when too much has failed."""
        self.recorder.samples(self.step + 1, trajectories)
        self.errors.check(trajectories)
        kept = trainable(trajectories, needs_groups=self.settings.needs_groups)
        return Experience.from_trajectories(kept), rollout_metrics(trajectories, kept)

    def improve(self, experience: Experience) -> dict[str, Metric]:
        """Update the policy on a credited batch; every rank gets its rows of every optimizer step."""
        plans = plan_update(
            experience.lengths.tolist(),
            ranks=self.policy.size,
            batch_size=self.settings.batch_size,
            epochs=self.settings.epochs,
            seed=self.settings.seed + self.step,
        )
        jobs = [
            PolicyUpdate(
                experience=rows_of_rank(experience, plan), steps=plan.steps, kl_coef=self.kl.coef
            )
            for plan in plans
        ]
        launched = self.policy.launch(PolicyWorker.update, jobs)
        results = gather(
            launched,
            timeout_s=self.settings.step_timeout,
            doing="update the policy",
            logs=self.policy.logs,
        )
        return merge_all(results)

    def after_step(self, metrics: dict[str, Metric]) -> None:
        """Log, adapt β, evaluate, checkpoint."""
        self.step += 1
        if "train/kl" in metrics:
            self.kl.update(metrics["train/kl"].value, int(metrics["rollout/num_samples"].value))
        total = sum(part.value for part in self.timing.values())
        timing = self.timing | {"timing/step_total": Last(total)}
        self.timing = {}
        self.recorder.step(self.step, values(metrics | timing))
        last = self.step == self.source.total_steps
        if self.settings.eval_steps > 0 and (self.step % self.settings.eval_steps == 0 or last):
            self.run_evaluation()
        if self.ckpt.save_steps > 0 and self.step % self.ckpt.save_steps == 0:
            self.save()

    def run_evaluation(self) -> None:
        """pass@k of the published weights; a new best is kept."""
        if self.evaluate is None:
            return
        self.recorder.display.status("evaluating")
        trajectories = self.evaluate()
        metrics = evaluation_metrics(trajectories, k=self.settings.eval_samples)
        self.recorder.evaluation(self.step, metrics)
        if self.best.improves(metrics) and self.step > 0:
            self.save(best=True)

    def save(self, *, best: bool = False) -> None:
        """Write a checkpoint of the run as it stands."""
        if self.ckpt.disable_ds and not self.ckpt.save_hf:
            return
        staged = self.checkpoints.begin(self.step, best=best, hf=self.ckpt.save_hf)
        if not self.ckpt.disable_ds:
            saved = self.policy.broadcast(
                PolicyWorker.save_checkpoint, staged.engine_dir("_actor"), staged.tag
            )
            gather(
                saved,
                timeout_s=self.settings.step_timeout,
                doing="save a checkpoint",
                logs=self.policy.logs,
            )
        if self.ckpt.save_hf:
            self.export(staged.hf_dir)
        self.checkpoints.commit(
            staged,
            state=self._state(),
            metric_key=self.best.key or None,
            metric_value=self.best.last,
        )

    def _state(self) -> RunState:
        return RunState(
            step=self.step,
            epoch=self.source.episode,
            consumed=self.source.consumed,
            kl_coef=self.kl.coef,
            best_metric_key=self.best.key or None,
            best_metric_value=self.best.value,
            run_dir=self.settings.run_dir,
            engines={"_actor": self.settings.layout},
            extra={"prompts": len(self.source.prompts)},
        )

    def resume(self, checkpoint: Checkpoint) -> None:
        """Continue where a checkpoint stands."""
        state = checkpoint.state
        loaded = self.policy.broadcast(
            PolicyWorker.load_checkpoint, checkpoint.engine_dir("_actor"), checkpoint.tag
        )
        gather(
            loaded,
            timeout_s=self.settings.step_timeout,
            doing="load the checkpoint",
            logs=self.policy.logs,
        )
        self.step, self.source.consumed = state.step, state.consumed
        if state.kl_coef is not None:
            self.kl.load_state_dict({"coef": state.kl_coef})
        self.best.restore(state.best_metric_key, state.best_metric_value)

    def export(self, path: str) -> None:
        """Write the policy as Transformers and a stock vLLM server load it."""
        exported = self.policy.broadcast(PolicyWorker.export, self.tokenizer, path)
        gather(
            exported,
            timeout_s=self.settings.step_timeout,
            doing="export the policy",
            logs=self.policy.logs,
        )

    def timed(self, name: str, iterable: Iterable[Any]) -> Iterator[Any]:
        """The items, with the seconds each took to come counted under `timing/<name>`."""
        iterator = iter(iterable)
        while True:
            with self.clock(name):
                self.recorder.display.status(name)
                item = next(iterator, None)
            if item is None:
                return
            yield item

    @contextmanager
    def clock(self, name: str) -> Iterator[None]:
        """Count the seconds within it under `timing/<name>` of this step."""
        self.recorder.display.status(name.replace("_", " "))
        start = time.perf_counter()
        yield
        self.timing[f"timing/{name}"] = Last(time.perf_counter() - start)


class BestMetric:
    """The best value of one evaluation metric so far; `key` empty locks on to the first `…_pass1` by name, `none` disables."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.value: float | None = None
        self.last: float | None = None

    def improves(self, metrics: Mapping[str, float]) -> bool:
        """Take note of an evaluation; True when its value is strictly better than all before."""
        if self.key == "none":
            return False
        plain = {name.removeprefix("eval/"): value for name, value in metrics.items()}
        if not self.key:
            self.key = min((name for name in plain if name.endswith("_pass1")), default="")
        self.last = plain.get(self.key)
        if self.last is None or math.isnan(self.last):
            return False
        if self.value is not None and self.last <= self.value:
            return False
        self.value = self.last
        return True

    def restore(self, key: str | None, value: float | None) -> None:
        """Continue with a checkpoint's best, if it is of the same metric."""
        if key and self.key in ("", key):
            self.key, self.value = key, value


def trainable(trajectories: Sequence[Trajectory], *, needs_groups: bool) -> list[Trajectory]:
    """Without the failed ones and those with nothing sampled; where samples are compared, without lone ones too."""
    finished = [t for t in trajectories if not t.failed and t.num_actions]
    if not needs_groups:
        return finished
    peers: dict[int, int] = {}
    for t in finished:
        peers[t.prompt.index] = peers.get(t.prompt.index, 0) + 1
    return [t for t in finished if peers[t.prompt.index] > 1]


def rollout_metrics(
    trajectories: Sequence[Trajectory], kept: Sequence[Trajectory]
) -> dict[str, Metric]:
    """What the rollout itself looked like, and the means of the user's extra numbers over the samples that gave them."""
    rewards = [t.reward for t in kept if t.reward is not None]
    count = len(rewards)
    mean = sum(rewards) / count if count else 0.0
    variance = sum((r - mean) ** 2 for r in rewards) / (count - 1) if count > 1 else 0.0
    metrics: dict[str, Metric] = {
        "rollout/reward_mean": Mean(sum(rewards), count),
        "rollout/reward_std": Last(variance**0.5),
        "rollout/response_length_mean": Mean(sum(t.num_actions for t in kept), len(kept)),
        "rollout/truncated_rate": Mean(sum(t.truncated for t in kept), len(kept)),
        "rollout/num_samples": Last(float(len(kept))),
        "train/score": Mean(
            sum(t.score for t in kept if t.score is not None),
            sum(t.score is not None for t in kept),
        ),
        "train/failed_episodes": Last(float(sum(t.failed for t in trajectories))),
    }
    logs = [{f"train/{name}": Mean(value, 1) for name, value in t.extra_logs.items()} for t in kept]
    return metrics | merge_all(logs)
