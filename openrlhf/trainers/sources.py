"""The source of the trajectories of each step."""

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
from openrlhf.rollout.background import BackgroundLoop
from openrlhf.rollout.generator import (
    Annotate,
    Generator,
    Group,
    Request,
    SamplingSpec,
    as_sampled,
    in_prompt_order,
)
from openrlhf.trainers.filtering import DynamicFilter

READ_TOGETHER = 64  # prompts


@dataclass(eq=False, repr=False)
class Source(ABC):
    """The loop's only view of generation: the batch of each remaining step, and how far the prompts
    are used up.

    `annotated` adds the scores that the filter `keep` reads. `errors` says how many episodes may
    fail. `consumed` counts the prompts of all epochs that are used up; checkpoints keep it.
    `total_steps` is the number of steps of the whole run; filtering may use up the prompts earlier.
    """

    prompts: PromptDataset
    generator: Generator
    loop: BackgroundLoop
    spec: SamplingSpec
    config: RLFlags
    _: KW_ONLY
    annotated: Annotate = as_sampled
    total_steps: int = field(init=False)

    def __post_init__(self) -> None:
        algo = self.config.algo
        self.train = self.config.train
        self.keep: DynamicFilter | None = None
        if algo.dynamic_filtering_enable:
            self.keep = DynamicFilter(*algo.dynamic_filtering_range)
        self.errors = ErrorBudget(self.config.reward)
        self.total_steps = len(self.config.step_sizes(len(self.prompts)))
        self.step = 0  # steps handed out
        self.consumed = 0  # prompts
        self._drawn = 0  # prompts handed to the generator, over all epochs

    @abstractmethod
    def __iter__(self) -> Iterator[list[Trajectory]]:
        """Yield the batch of each remaining step."""

    @property
    @abstractmethod
    def exhausted(self) -> bool:
        """Whether no prompt is left."""

    def resume(self, *, step: int, consumed: int, folder: Path) -> None:
        """Continue after `step`, when `consumed` prompts had been used.

        `folder` is the one that `save` wrote to.
        """
        self.step = step
        self.consumed = consumed

    def save(self, folder: Path) -> None:  # noqa: B027 — a source may have nothing to keep
        """Write what has been drawn and not been trained on.

        By default nothing is written, because it is drawn again.
        """

    def publishing(self, version: int) -> AbstractContextManager[bool]:
        """Yield whether weights can be published in the block.

        By default they can, because no sample is in progress between steps.
        """
        return nullcontext(True)

    def close(self) -> None:  # noqa: B027 — or to end
        """End what is in progress."""

    @property
    def epoch(self) -> int:
        """The number of complete passes over the prompts."""
        return self.consumed // len(self.prompts)

    def rest_of_epoch(self, drawn: int) -> Iterator[Prompt]:
        """Yield the prompts that are left of an epoch, numbered as they are drawn.

        `drawn` prompts have been drawn before, in all epochs.
        """
        loader = DataLoader(
            self.prompts,
            batch_size=READ_TOGETHER,
            sampler=self._order(drawn),
            collate_fn=list,
            num_workers=self.config.data.dataloader_num_workers,
        )
        # Counts prompts handed out, not prompts that the loader has read ahead.
        for self._drawn, prompt in enumerate(chain.from_iterable(loader), drawn + 1):
            yield replace(prompt, index=self._drawn - 1)

    def prompt(self, number: int) -> Prompt:
        """Return the prompt that is drawn after `number` others."""
        row = next(iter(self._order(number)))
        return replace(self.prompts[row], index=number)

    def _order(self, drawn: int) -> ResumableSampler:
        return ResumableSampler(
            len(self.prompts), seed=self.train.seed, consumed=drawn, drop_last=False
        )

    async def judged(self, group: Group) -> Group:
        """Return the group with all scores that the filter reads, marked if it is rejected."""
        group = await self.annotated(group)
        if self.keep is None:
            return group
        return self.keep.marked(group)

    def metrics(self) -> dict[str, Metric]:
        """Return the cost of generation since the last call."""
        return self.generator.metrics()


@dataclass(eq=False, repr=False)
class SyncSource(Source):
    """Generates with the weights of the last publication, when the loop asks for a step and no
    finished step is waiting.

    `batch_size` is the number of prompts per step, without rejected prompts; the last batch of an
    epoch may be short. `at_once` is the number of prompts that are generated together, at least one
    step. If they make several steps, the later steps train weights newer than the weights that
    sampled them. `last_step`: the generator gives nothing after that step. `consumed` counts the
    prompts that steps have had. A resumed run starts there, and draws the waiting prompts again.
    """

    last_step: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.batch_size = self.spec.rollout.batch_size
        self.at_once = self.spec.rollout.vllm_generate_batch_size or self.batch_size

    @property
    def exhausted(self) -> bool:
        """Whether all epochs have ended, or the generator gives nothing more."""
        if self.last_step is not None and self.step >= self.last_step:
            return True
        return self.epoch >= self.train.num_episodes

    def __iter__(self) -> Iterator[list[Trajectory]]:
        while not self.exhausted:
            yield from self._steps_of_epoch(self.rest_of_epoch(self.consumed))
            self.consumed = self._drawn

    def _steps_of_epoch(self, prompts: Iterator[Prompt]) -> Iterator[list[Trajectory]]:
        """Yield the samples of each step.

        Samples of a rejected prompt belong to the step of the kept group before them.
        """
        waiting: list[Group] = []  # the groups of later steps
        while not self.exhausted:
            if len(_kept(waiting)) < self.batch_size:
                waiting += self._generate(prompts)
            if not waiting:
                return
            # A step ends before the first kept group that is one too many.
            too_many = _kept(waiting)[self.batch_size :]
            end = too_many[0] if too_many else len(waiting)
            step = waiting[:end]
            waiting = waiting[end:]
            self.consumed = self._drawn
            if waiting:
                self.consumed = waiting[0][0].prompt.index
            if _kept(step):  # the rest of an epoch may teach nothing
                self.step += 1
            yield list(chain.from_iterable(step))

    def _generate(self, prompts: Iterator[Prompt]) -> list[Group]:
        """Return the groups of the next prompts, in prompt order; none if the epoch is over.

        If so many samples have failed that the errors exceed their budget in any case, the batch
        ends early and the loop reports the errors. A batch of several steps never ends early,
        because its cancelled prompts would be missing in the epoch.
        """
        request = Request(spec=self.spec, step=self.step + 1, annotated=self.judged)
        may_end_early = self.keep is not None or self.at_once == self.batch_size
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
        if self.keep and groups and not _kept(groups) and not lost:
            warn(
                f"The last {len(groups)} prompts of an epoch teach nothing: none has a mean score "
                f"between {self.keep.low:g} and {self.keep.high:g} "
                "(--algo.dynamic_filtering_range)."
            )
        return groups


def _kept(groups: Sequence[Sequence[Trajectory]]) -> list[int]:
    """Return the places of the groups that are trained on."""
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
    """Return the episodes of every evaluation prompt, with the weights after `step`.

    As many prompts are generated at a time as training has in a step. `finished` is called with the
    episodes of each prompt when they have finished.
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
