"""Sources of trajectories that generate the batch for each training step."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import chain
from pathlib import Path

from torch.utils.data import DataLoader

from openrlhf.config.learning import RLFlags
from openrlhf.core.trajectory import Prompt, Trajectory
from openrlhf.data.batching import ResumableSampler
from openrlhf.data.prompts import PromptDataset
from openrlhf.observability.metrics import Metric
from openrlhf.reporting import warn
from openrlhf.rewards.budget import ErrorBudget
from openrlhf.rollout.background import SLOW_STEP, BackgroundLoop
from openrlhf.rollout.generator import (
    Generator,
    Group,
    GroupTransform,
    Request,
    SamplingSpec,
    in_prompt_order,
    unchanged,
)
from openrlhf.trainers.filtering import DynamicFilter, thrown_away

READ_TOGETHER = 64  # number of prompts that the data loader reads at a time


@dataclass(eq=False, repr=False)
class Source(ABC):
    """The training loop's only interface to generation: remaining batches and prompt progress.

    `score_group` adds the scores that `dynamic_filter` needs. `errors` limits how many episodes may
    fail. `consumed`, which is saved in checkpoints, is the number of prompts used over all epochs.
    `total_steps` is the planned number of steps; filtering may use up the prompts earlier.
    """

    prompts: PromptDataset
    generator: Generator
    loop: BackgroundLoop
    spec: SamplingSpec
    config: RLFlags
    _: KW_ONLY
    score_group: GroupTransform = unchanged
    total_steps: int = field(init=False)

    def __post_init__(self) -> None:
        algo = self.config.algo
        self.train = self.config.train
        self.dynamic_filter: DynamicFilter | None = None
        if algo.dynamic_filtering_enable:
            self.dynamic_filter = DynamicFilter(*algo.dynamic_filtering_range)
        self.errors = ErrorBudget(self.config.reward)
        self.total_steps = len(self.config.step_sizes(len(self.prompts)))
        self.step = 0  # number of steps yielded
        self.consumed = 0  # number of prompts used
        self._drawn = 0  # number of prompts passed to the generator, over all epochs

    @abstractmethod
    def __iter__(self) -> Iterator[list[Trajectory]]:
        """Yield the batch of each remaining step."""

    @property
    @abstractmethod
    def exhausted(self) -> bool:
        """True if no prompt is left."""

    def resume(self, *, step: int, consumed: int, folder: Path) -> None:
        """Resume after `step`, when `consumed` prompts had been used.

        The files were written to `folder` by `save`.
        """
        self.step = step
        self.consumed = consumed

    def save(self, folder: Path) -> None:  # noqa: B027 — a source may have nothing to save
        """Write the samples that have been generated but not trained on yet.

        By default, nothing is written, because a resumed run generates these samples again.
        """

    def publishing(self, version: int) -> AbstractContextManager[bool]:
        """Yield whether weights can be published in the block.

        By default, the value is True, because no sample is in progress between steps.
        """
        return nullcontext(True)

    def close(self) -> None:  # noqa: B027 — a source may have nothing to stop
        """Stop any generation in progress."""

    @property
    def epoch(self) -> int:
        """The number of complete passes over the prompts."""
        return self.consumed // len(self.prompts)

    def rest_of_epoch(self, drawn: int) -> Iterator[Prompt]:
        """Yield the remaining prompts of an epoch, numbered in the order in which they are drawn.

        `drawn` is the number of prompts that have already been drawn, over all epochs.
        """
        loader = DataLoader(
            self.prompts,
            batch_size=READ_TOGETHER,
            sampler=self._order(drawn),
            collate_fn=list,
            num_workers=self.config.data.dataloader_num_workers,
        )
        for index, prompt in enumerate(chain.from_iterable(loader), drawn):
            self._drawn = index + 1  # counts the yielded prompts, but not the prefetched prompts
            yield replace(prompt, index=index)

    def prompt(self, number: int) -> Prompt:
        """Return the prompt to draw after `number` prompts have been drawn."""
        row = next(iter(self._order(number)))
        return replace(self.prompts[row], index=number)

    def _order(self, drawn: int) -> ResumableSampler:
        return ResumableSampler(
            len(self.prompts), seed=self.train.seed, consumed=drawn, drop_last=False
        )

    async def score_and_filter(self, group: Group) -> Group:
        """Return the group with the scores needed by the filter, marked as filtered if rejected."""
        group = await self.score_group(group)
        if self.dynamic_filter and self.dynamic_filter.rejects(group):
            return list(map(thrown_away, group))
        return group

    def metrics(self) -> dict[str, Metric]:
        """Return the cost of generation since the last call."""
        return self.generator.metrics()


@dataclass(eq=False, repr=False)
class SyncSource(Source):
    """Generates each batch when the training loop needs it, with the last published weights.

    `batch_size` is the number of prompts per step, not counting rejected prompts; the last batch of
    an epoch may be smaller. `at_once` is the number of prompts to generate responses for at a time
    (at least one step's prompts). If `at_once` prompts fill several steps, the later steps train on
    samples from older weights. The generator yields nothing after step `last_step`. `consumed`
    counts the prompts of the yielded steps. A resumed run continues after these prompts and
    generates the waiting groups again.
    """

    last_step: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.batch_size = self.spec.rollout.batch_size
        self.at_once = self.spec.rollout.vllm_generate_batch_size or self.batch_size

    @property
    def exhausted(self) -> bool:
        """True if all epochs have ended, or the generator has no more steps."""
        if self.last_step is not None and self.step >= self.last_step:
            return True
        return self.epoch >= self.train.num_episodes

    def __iter__(self) -> Iterator[list[Trajectory]]:
        while not self.exhausted:
            yield from self._steps_of_epoch(self.rest_of_epoch(self.consumed))
            self.consumed = self._drawn

    def _steps_of_epoch(self, prompts: Iterator[Prompt]) -> Iterator[list[Trajectory]]:
        """Yield the samples of each step.

        Samples of a rejected prompt belong to the same step as the kept group before them.
        """
        waiting: list[Group] = []  # groups for later steps
        while not self.exhausted:
            if len(_kept(waiting)) < self.batch_size:
                waiting += self._generate(prompts)
            else:
                self._rest()
            if not waiting:
                return
            # A step ends just before the first kept group that no longer fits.
            too_many = _kept(waiting)[self.batch_size :]
            end = too_many[0] if too_many else len(waiting)
            step = waiting[:end]
            waiting = waiting[end:]
            self.consumed = self._drawn
            if waiting:
                self.consumed = waiting[0][0].prompt.index
            if _kept(step):  # all groups may be rejected at the end of an epoch
                self.step += 1
            yield list(chain.from_iterable(step))

    def _rest(self) -> None:
        """Free the device memory that the last publication has taken, because no stream will."""
        self.loop.run(
            self.generator.rest(),
            self.train.step_timeout,
            doing="free the engines' device memory",
            hint=SLOW_STEP,
        )

    def _generate(self, prompts: Iterator[Prompt]) -> list[Group]:
        """Return the groups of the next prompts in prompt order, or an empty list after the epoch.

        A batch whose failures will certainly exceed the error budget is aborted early, and the
        training loop reports the errors. Without dynamic filtering, a batch for several steps is
        not aborted, because its cancelled prompts would be missing from the epoch. With dynamic
        filtering, the prompts of failed samples would be replaced until the end of the epoch.
        """
        request = Request(spec=self.spec, step=self.step + 1, on_group=self.score_and_filter)
        dynamic_filter = self.dynamic_filter
        may_end_early = dynamic_filter is not None or self.at_once == self.batch_size
        groups: list[Group] = []
        failed = 0
        samples = 0
        lost = False
        stream = self.generator.stream(prompts, request, groups=self.at_once)
        for group in self.loop.iterate(stream, self.train.step_timeout):
            groups.append(group)
            failed += sum(trajectory.failed for trajectory in group)
            samples += len(group)
            planned = max(samples, self.at_once * self.spec.n_samples)
            lost = self.errors.exceeded_by(failed, of=planned)
            if may_end_early and lost:
                break
        groups.sort(key=lambda group: group[0].prompt.index)
        if dynamic_filter and groups and not _kept(groups) and not lost:
            warn(
                f"The last {len(groups)} prompts of an epoch were all rejected: none has a mean "
                f"score between {dynamic_filter.low:g} and {dynamic_filter.high:g} "
                "(--algo.dynamic_filtering_range)."
            )
        return groups


def _kept(groups: Sequence[Sequence[Trajectory]]) -> list[int]:
    """Return the indices of the groups kept by the filter."""
    return [place for place, group in enumerate(groups) if not group[0].filtered]


def evaluate(
    prompts: PromptDataset,
    generator: Generator,
    loop: BackgroundLoop,
    spec: SamplingSpec,
    *,
    step: int,
    timeout_s: float,
    finished: Callable[[Group], None] = lambda group: None,
) -> list[Trajectory]:
    """Return episodes for all evaluation prompts, generated with the weights after `step`.

    Responses are generated for as many prompts at a time as a training step has. `finished` is
    called with each prompt's episodes when they have finished.
    """
    every_prompt = (prompts[row] for row in range(len(prompts)))
    request = Request(spec=spec, step=step)
    stream = generator.stream(
        every_prompt, request, groups=len(prompts), at_once=spec.rollout.batch_size
    )
    groups: list[Group] = []
    for group in loop.iterate(stream, timeout_s):
        groups.append(group)
        finished(group)
    return in_prompt_order(groups)
