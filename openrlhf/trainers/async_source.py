"""Asynchronous training: samples are generated while the loop trains on earlier ones."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path

from openrlhf import termination
from openrlhf.core.trajectory import Prompt, Trajectory
from openrlhf.observability.metrics import Last, Max, Mean, Metric
from openrlhf.rollout.background import CLOSE_TIMEOUT_S
from openrlhf.rollout.episode_files import EpisodeFolder
from openrlhf.rollout.generator import Group, Request
from openrlhf.trainers.capacity import Capacity, Held
from openrlhf.trainers.sources import Source

TERMINATION_CHECK_S = 0.2  # while a publication waits for samples


@dataclass(kw_only=True)
class Started(Held):
    """A prompt that has started, and its samples when they are finished."""

    prompt: Prompt
    group: Group = field(default_factory=list[Trajectory])
    failed: int = 0  # samples of the group
    unpublished: int = 0  # steps since its start that published nothing

    def finish(self, group: Group) -> None:
        """Keep of the samples what training needs."""
        self.group = [episode.packed() for episode in group]
        self.failed = sum(episode.failed for episode in group)
        self.finished = True
        self.filtered = group[0].filtered

    @property
    def is_worthless(self) -> bool:
        """Whether every sample of the prompt has failed, or none has finished."""
        return self.failed == len(self.group)


@dataclass(eq=False, repr=False)
class AsyncSource(Source):
    """Keeps as many prompts in generation as `Capacity` allows, and gives the loop finished ones.

    Private methods run in the event loop, public ones in the controller's thread. Prompts start in
    order; epochs follow each other without a break. With --train.partial_rollout_enable, samples in
    progress continue with the new weights. Otherwise a publication waits until their last tokens
    are drawn, and every sample has one version. It does not wait for rewards. `consumed` counts the
    prompts that have been drawn.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rule = Capacity(
            batch=self.spec.rollout.batch_size,
            queue=self.train.async_queue_size,
            staleness=self.train.max_staleness,
        )
        self.total_prompts = len(self.prompts) * self.train.num_episodes
        self.version = 0  # of the engines' weights
        self.held: list[Started] = []
        self._left = self._prompts()
        self._tasks: set[asyncio.Task[None]] = set()
        # By prompt: done when its last token is drawn.
        self._sampling: dict[int, asyncio.Future[None]] = {}
        self._publishing = False
        self._changed = asyncio.Event()
        self._lags: Counter[int] = Counter()
        self._waiting = 0  # finished prompts when the last step was taken

    @property
    def exhausted(self) -> bool:
        """Whether no prompt is left, and none is held."""
        return self.consumed >= self.total_prompts and not self.held

    def _prompts(self) -> Iterator[Prompt]:
        while self.consumed < self.total_prompts:
            for prompt in self.rest_of_epoch(self.consumed):
                self.consumed += 1
                yield prompt

    def resume(self, *, step: int, consumed: int, folder: Path) -> None:
        """Continue after `step`, when about `consumed` prompts had been drawn.

        `folder` is the one that `save` wrote to; it has the exact number. Samples that had not
        finished are drawn again, with the present weights.
        """
        files = EpisodeFolder(folder)
        run = files.header("step", step)["run"]
        self.step = step
        self.version = step
        self.consumed = run.get("consumed", consumed)
        groups: dict[int, Group] = defaultdict(list)
        for episode in files.read("step", step):
            groups[episode.prompt.index].append(episode)
        for index, version in run["held"]:
            prompt = self.prompt(index)  # with the label as it is in the data
            group = [replace(episode, prompt=prompt) for episode in groups[index]]
            if group:
                begun = Started(version=version, prompt=prompt)
                begun.finish(group)
            else:
                begun = Started(version=step, prompt=prompt)
            self.held.append(begun)

    def save(self, folder: Path) -> None:
        """Write the prompts that have started and not been trained on, with their finished samples.

        Samples of a prompt that have all failed are not kept: the reward may have been repaired
        when the run continues.
        """
        held, consumed = self.loop.run(self._snapshot(), self.train.step_timeout)
        drawn: list[tuple[int, int]] = []
        episodes: Group = []
        for each in held:
            drawn.append((each.prompt.index, each.version))
            if not each.is_worthless:
                episodes += each.group
        run = {"held": drawn, "consumed": consumed}
        EpisodeFolder(folder).write("step", self.step, episodes, run=run)

    async def _snapshot(self) -> tuple[list[Started], int]:
        return [replace(each) for each in self.held], self.consumed

    def __iter__(self) -> Iterator[list[Trajectory]]:
        while not self.exhausted:
            groups = None
            while groups is None:  # something finishes in time, or the loop raises
                groups = self.loop.run(self._progress(), self.train.step_timeout)
            yield list(chain.from_iterable(groups))

    async def _progress(self) -> list[Group] | None:
        """Return the groups of the next step.

        Returns None if the step has to wait for more and something has changed meanwhile.
        """
        self._start()
        places = self.rule.step(self.held, self.version, last=self.consumed >= self.total_prompts)
        if places is None and self._has_lost_too_many:
            # The loop reports the errors.
            places = [place for place, each in enumerate(self.held) if each.finished]
        if places is None:
            await self._wait()
            return None
        taken = self._take(places)
        self._start()
        return [each.group for each in taken]

    async def _wait(self) -> None:
        """Wait until something has changed, and raise what prompts raised."""
        await self._changed.wait()
        self._changed.clear()
        done = {task for task in self._tasks if task.done()}
        self._tasks -= done
        await asyncio.gather(*done)

    def _take(self, places: list[int]) -> list[Started]:
        """Remove the prompts in these places, and count them as a step."""
        finished = sum(each.finished for each in self.held)
        self._waiting = finished - len(places)
        taken = [self.held[place] for place in places]
        self.held = [each for place, each in enumerate(self.held) if place not in places]
        kept = [each for each in taken if not each.filtered]
        if kept:
            self.step += 1
        for each in kept:
            newest = self.version - each.unpublished
            for episode in each.group:
                if episode.weight_versions:
                    self._lags[newest - min(episode.weight_versions)] += 1
        return taken

    @property
    def _has_lost_too_many(self) -> bool:
        """Whether so many of the finished samples have failed that the loop raises in any case.

        Then no other prompt need be drawn.
        """
        failed = 0
        samples = 0
        for each in self.held:
            failed += each.failed
            samples += len(each.group)
        planned = max(samples, self.rule.batch * self.spec.n_samples)
        return self.errors.exceeded_by(failed, of=planned)

    def _start(self) -> None:
        """Start as many prompts as there is room for.

        The prompts of a resumed run that had not finished come first.
        """
        if self._publishing or self._has_lost_too_many:
            return
        starting: list[Started] = []
        if not self._tasks:
            starting = [each for each in self.held if not each.finished]
        for prompt in islice(self._left, self.rule.room(self.held)):
            fresh = Started(version=self.version, prompt=prompt)
            starting.append(fresh)
            self.held.append(fresh)
        for each in starting:
            self._tasks.add(asyncio.ensure_future(self._generate(each)))

    async def _generate(self, started: Started) -> None:
        """Generate and judge the samples of a prompt. A rejected prompt is replaced at once."""
        end_of_sampling = asyncio.get_running_loop().create_future()
        self._sampling[started.prompt.index] = end_of_sampling
        request = Request(
            spec=self.spec, step=self.step + 1, annotated=self.judged, sampled=self._end_sampling
        )
        try:
            async for group in self.generator.stream([started.prompt], request, groups=1):
                started.finish(group)
                if started.filtered:
                    self._start()
        finally:
            self._end_sampling(started.prompt)
            self._changed.set()

    def _end_sampling(self, prompt: Prompt) -> None:
        """Note that the engines draw no more tokens of a prompt. May be called twice."""
        under_way = self._sampling.pop(prompt.index, None)
        if under_way and not under_way.done():
            under_way.set_result(None)

    @contextmanager
    def publishing(self, version: int) -> Iterator[bool]:
        """Start no prompt within the block.

        Without --train.partial_rollout_enable, no token is drawn there either. Yields False if the
        process is asked to end while samples are still being drawn: nothing is to be published
        then.
        """
        is_quiet = self.loop.run(self._hold(), self.train.step_timeout)
        yield is_quiet
        if is_quiet:
            self.loop.run(self._continue(version), self.train.step_timeout)

    async def _hold(self) -> bool:
        self._publishing = True
        if self.train.partial_rollout_enable:
            return True
        while self._sampling and not termination.asked():
            await asyncio.wait(self._sampling.values(), timeout=TERMINATION_CHECK_S)
        return not self._sampling

    async def _continue(self, version: int) -> None:
        # Steps that left the weights as they were have versions of their own.
        skipped = version - self.version - 1
        for each in self.held:
            each.version += skipped
            each.unpublished += skipped
        self._publishing = False
        self.version = version
        self._start()

    def close(self) -> None:
        """End the samples in progress."""
        self.loop.run(self._cancel(), CLOSE_TIMEOUT_S)

    async def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def metrics(self) -> dict[str, Metric]:
        """Return the cost of generation, the age of the samples, and the prompts that waited.

        All are those since the last call.
        """
        lags = self._lags
        self._lags = Counter[int]()
        number = lags.total()
        metrics = super().metrics()
        total = 0
        for lag, count in sorted(lags.items()):
            metrics[f"rollout/lag_{lag}"] = Mean(count, number)
            total += lag * count
        unfinished = sum(not each.finished for each in self.held)
        metrics["rollout/lag_mean"] = Mean(total, number)
        metrics["rollout/lag_max"] = Max(float(max(lags, default=0)))
        metrics["rollout/waiting_prompts"] = Last(float(self._waiting))
        metrics["rollout/prompts_under_way"] = Last(float(unfinished))
        return metrics
