"""Where the trajectories of a step come from. The loop is the same for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import TypeVar

from torch.utils.data import DataLoader

from openrlhf.data.batching import ResumableSampler
from openrlhf.data.prompts import PromptDataset, PromptRow
from openrlhf.observability.metrics import Metric
from openrlhf.rollout.generator import Rejects, SamplingSpec
from openrlhf.rollout.recorded import Generator
from openrlhf.trainers.filtering import DynamicFilter, by_prompt
from openrlhf.trajectory import Prompt, Trajectory

Scored = Callable[[Sequence[Trajectory]], list[Trajectory]]  # with what reward models say
T = TypeVar("T")


class SyncSource:
    """Generates when it is asked for a step that is not waiting, with the weights of the last publication.

    `batch_size`: prompts per step, those that `keep` rejects not counted. `at_once`: prompts generated together, at least as
    many. When they are more, those left over wait, and their steps train weights newer than those that sampled them.
    `episodes`: passes over the prompts; the last batch of a pass may be short; the generator may have `ended` before.
    `consumed`: prompts that steps have had, counted over all passes; a resumed run starts there, and draws those again
    that were waiting.
    """

    def __init__(
        self,
        prompts: PromptDataset,
        generator: Generator,
        spec: SamplingSpec,
        scored: Scored,
        *,
        batch_size: int,
        at_once: int | None = None,
        episodes: int,
        seed: int,
        num_workers: int = 0,
        keep: DynamicFilter | None = None,
        ended: Callable[[], bool] = lambda: False,
    ) -> None:
        self.prompts, self.generator, self.spec = prompts, generator, spec
        self.scored, self.keep = scored, keep
        self.batch_size, self.episodes, self.seed = batch_size, episodes, seed
        self.at_once = at_once or batch_size
        self.num_workers, self.ended = num_workers, ended
        self.consumed = 0
        self._drawn = 0  # prompts handed to the generator, over all passes

    @property
    def steps_per_episode(self) -> int:
        """Batches per pass over the prompts."""
        return -(-len(self.prompts) // self.batch_size)

    @property
    def total_steps(self) -> int:
        """Batches of the whole run; at most so many where prompts are filtered."""
        return self.steps_per_episode * self.episodes

    @property
    def episode(self) -> int:
        """Passes over the prompts that are complete."""
        return self.consumed // len(self.prompts)

    @property
    def exhausted(self) -> bool:
        """Whether steps have had every prompt of every pass, or nothing comes for those that are left."""
        return self.episode >= self.episodes or self.ended()

    def _rest_of_pass(self) -> Iterator[Prompt]:
        """Prompts one by one; `_drawn` counts those handed out, not those that the loader has read ahead."""
        self._drawn = self.consumed
        for row in chain.from_iterable(self._loader()):
            self._drawn += 1
            yield row.drawn(self._drawn - 1)

    def _loader(self) -> DataLoader[PromptRow]:
        sampler = ResumableSampler(len(self.prompts), seed=self.seed, consumed=self.consumed, drop_last=False)
        return DataLoader(
            self.prompts, batch_size=self.batch_size, sampler=sampler, collate_fn=list, num_workers=self.num_workers
        )

    def metrics(self) -> dict[str, Metric]:
        """What generation has cost since this was last asked."""
        return self.generator.metrics()

    def __iter__(self) -> Iterator[list[Trajectory]]:
        while not self.exhausted:
            yield from self._steps_of_pass(self._rest_of_pass())
            self.consumed = self._drawn

    def _steps_of_pass(self, prompts: Iterator[Prompt]) -> Iterator[list[Trajectory]]:
        """The scored samples of each step. Those of a rejected prompt go with the kept ones before them."""
        waiting: list[list[Trajectory]] = []  # the groups of later steps
        while True:
            if len(_kept(waiting)) < self.batch_size:
                waiting += by_prompt(self._generate(prompts))
            if not waiting:
                return
            end = next(iter(_kept(waiting)[self.batch_size :]), len(waiting))
            step, waiting = waiting[:end], waiting[end:]
            self.consumed = waiting[0][0].prompt.index if waiting else self._drawn
            yield [trajectory for group in step for trajectory in group]

    def _generate(self, prompts: Iterator[Prompt]) -> list[Trajectory]:
        """Scored samples of the next prompts; none where the pass is over."""
        if self.keep is None:
            one_step = self.at_once == self.batch_size  # that of a larger batch which fails would not be known here
            batch = islice(prompts, self.at_once)
            return self.scored(self.generator.rollout(batch, self.spec, may_end_early=one_step))
        return self.keep.fill(self.at_once, prompts, self._refilled)

    def _refilled(self, prompts: Iterator[Prompt], groups: int, rejects: Rejects) -> list[Trajectory]:
        return self.scored(self.generator.rollout(prompts, self.spec, groups=groups, rejects=rejects))


def _kept(groups: Sequence[Sequence[Trajectory]]) -> list[int]:
    """The places of the groups that are trained on."""
    return [place for place, group in enumerate(groups) if not group[0].filtered]


def evaluate(prompts: PromptDataset, generator: Generator, spec: SamplingSpec, *, wave: int) -> list[Trajectory]:
    """Episodes of every evaluation prompt, generated in waves of `wave` prompts."""
    trajectories: list[Trajectory] = []
    for first in range(0, len(prompts), wave):
        indices = range(first, min(first + wave, len(prompts)))
        trajectories += generator.rollout([prompts[i].drawn(i) for i in indices], spec)
    return trajectories


def evaluation_metrics(trajectories: Sequence[Trajectory], *, k: int) -> dict[str, float]:
    """pass@1 and pass@k per data source, rewards, response lengths and truncation, under the logged names.

    pass@1 is the mean over prompts of the mean score of their samples, pass@k of the best one. Failed samples are left
    out and counted.
    """
    finished = [t for t in trajectories if not t.failed]
    metrics = {
        "eval/eval_num_samples": float(len(trajectories)),
        "eval/eval_failed_episodes": float(len(trajectories) - len(finished)),
    }
    for source, members in of_sources(finished, lambda t: t).items():
        metrics |= _source_metrics(f"eval/eval_{source}", members, k=k)
    if finished:
        metrics["eval/eval_response_length_mean"] = _mean([t.num_actions for t in finished])
        metrics["eval/eval_truncated_rate"] = _mean([t.truncated for t in finished])
    return metrics


def of_sources(items: Iterable[T], episode: Callable[[T], Trajectory]) -> dict[str, list[T]]:
    """The items of each data source, which is that of their episode."""
    sources: dict[str, list[T]] = {}
    for item in items:
        sources.setdefault(episode(item).prompt.datasource, []).append(item)
    return dict(sorted(sources.items()))


def source_columns(trajectories: Sequence[Trajectory], *, k: int) -> dict[str, float]:
    """What a table shows of the episodes of a data source."""
    finished = [t for t in trajectories if not t.failed]
    numbers = _source_metrics("", finished, k=k)
    return {
        "prompts": len({t.prompt.index for t in trajectories}),
        "pass@1": numbers["_pass1"],
        f"pass@{k}": numbers[f"_pass{k}"],
        "reward": numbers["_reward_mean"],
        "tokens": numbers["_response_length_mean"],
        "truncated": numbers["_truncated_rate"],
        "failed": len(trajectories) - len(finished),
    }


def _source_metrics(prefix: str, members: Sequence[Trajectory], *, k: int) -> dict[str, float]:
    scores: dict[int, list[float]] = {}
    for t in members:
        if t.score is not None:
            scores.setdefault(t.prompt.index, []).append(t.score)
    return {
        f"{prefix}_pass{k}": _mean([max(group) for group in scores.values()]),
        f"{prefix}_pass1": _mean([_mean(group) for group in scores.values()]),
        f"{prefix}_reward_mean": _mean([t.reward for t in members if t.reward is not None]),
        f"{prefix}_response_length_mean": _mean([t.num_actions for t in members]),
        f"{prefix}_truncated_rate": _mean([t.truncated for t in members]),
    }


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else float("nan")
