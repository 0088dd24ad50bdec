"""Updates the critic and the policy on a batch with advantages."""

from collections.abc import Sequence
from dataclasses import dataclass

from openrlhf.cluster.worker_group import Call, WorkerGroup, wait_for
from openrlhf.config.learning import RLFlags
from openrlhf.core.batches import Experience, TokenRows
from openrlhf.data.batching import row_costs
from openrlhf.observability.metrics import Metric, merge_all
from openrlhf.trainers.pretraining_mix import PretrainingMix
from openrlhf.trainers.update_plan import plan_update
from openrlhf.weights.publisher import WeightPublisher
from openrlhf.workers.base import Update
from openrlhf.workers.critic import CriticWorker
from openrlhf.workers.policy import PolicyUpdate, PolicyWorker


@dataclass(frozen=True, kw_only=True)
class ModelUpdate:
    """Updates a run's models, all of which take the same optimizer steps in the same order.

    The critic and the policy are updated in parallel if they are on different devices.
    """

    policy: WorkerGroup
    critic: WorkerGroup | None
    weights: WeightPublisher
    pretraining: PretrainingMix | None
    config: RLFlags

    def improve(self, experience: Experience, *, step: int, kl_coef: float) -> dict[str, Metric]:
        """Run the update that follows `step` finished steps, and return its metrics.

        While only the critic is trained (--critic.freezing_steps), the policy is not updated.
        """
        launched: list[Call] = []
        if self.critic:
            updates = self._updates(experience, self.critic, CriticWorker, step)
            launched += self.critic.launch(CriticWorker.update, updates)
        if step >= self.config.frozen_steps:
            launched += self._launch_policy(experience, step, kl_coef)
        timeout_s = self.config.train.step_timeout
        return merge_all(wait_for(launched, timeout_s=timeout_s, doing="update the models"))

    def _launch_policy(self, experience: Experience, step: int, kl_coef: float) -> list[Call]:
        planned = self._updates(experience, self.policy, PolicyWorker, step)
        texts: Sequence[Sequence[TokenRows]] = [()] * self.policy.slices
        if self.pretraining:
            first = step * self.config.updates_of(self.config.rollout.batch_size)
            texts = self.pretraining.for_slices(
                range(first, first + len(planned[0].steps)),
                self.policy.slices,
                attention_length=self.policy.attention_length,
            )
        updates: list[PolicyUpdate] = []
        for update, text in zip(planned, texts, strict=True):
            updates.append(PolicyUpdate(**vars(update), kl_coef=kl_coef, pretraining=text))
        with self.weights.sending:  # wait until no engine is receiving weights
            self.weights.version = step + 1  # a refit from now on sends the updated weights
            return self.policy.launch(PolicyWorker.update, updates)

    def _updates(
        self,
        experience: Experience,
        workers: WorkerGroup,
        worker: type[CriticWorker | PolicyWorker],
        step: int,
    ) -> list[Update]:
        """Return the update for each of the workers' data slices, with the columns it needs."""
        needed = experience.only(*worker.update_columns)
        train = self.config.train
        plans = plan_update(
            row_costs(experience.lengths.tolist(), workers.attention_length),
            episodes=experience.episode_of_row.tolist(),
            slices=workers.slices,
            batch_size=train.batch_size,
            epochs=train.max_epochs,
            seed=train.seed + step,
        )
        return [Update(experience=needed.select(plan.rows), steps=plan.steps) for plan in plans]
