"""Asynchronous training: samples are generated while the loop trains on earlier samples."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path

from openrlhf.core.trajectory import Prompt, Trajectory
from openrlhf.observability.metrics import Last, Max, Mean, Metric
from openrlhf.rollout.background import CANCEL, CLOSE_TIMEOUT_S, NEXT_GROUP, SLOW_STEP
from openrlhf.rollout.episode_files import EpisodeFolder
from openrlhf.rollout.generator import Group, Request
from openrlhf.trainers.capacity import Capacity, Held
from openrlhf.trainers.sampling_gate import SamplingGate
from openrlhf.trainers.sources import Source


@dataclass(kw_only=True)
class PromptInFlight(Held):
    """A prompt whose generation has started, and its samples once they have finished."""

    prompt: Prompt
    group: Group = field(default_factory=list[Trajectory])
    failed: int = 0  # number of failed samples in the group
    # Number of version increments since the start for steps that published nothing.
    # These increments do not count as age.
    unpublished: int = 0

    def finish(self, group: Group) -> None:
        """Store the finished samples, keeping only what training needs."""
        self.group = [episode.packed() for episode in group]
        self.failed = sum(episode.failed for episode in group)
        self.finished = True
        self.filtered = group[0].filtered


@dataclass(eq=False, repr=False)
class AsyncSource(Source):
    """Generates samples for as many prompts at once as `Capacity` allows. Yields finished prompts.

    Private methods run in the event loop, and public methods run in the controller's thread.
    Prompts start in order, without a pause between epochs. With --train.partial_rollout_enable,
    samples in progress continue with the new weights. Otherwise, a publication waits until the last
    tokens of samples in progress have been generated, so that every sample has a single weight
    version. A publication does not wait for rewards. `consumed` counts the prompts that have been
    drawn.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rule = Capacity(
            batch=self.spec.rollout.batch_size,
            queue=self.train.async_queue_size,
            staleness=self.train.max_staleness,
        )
        self.total_prompts = len(self.prompts) * self.train.num_episodes
        self.version = 0  # version of the engines' weights
        self.held: list[PromptInFlight] = []
        self._unfinished_at_resume: list[PromptInFlight] = []  # restarted before new prompts start
        self._left = self._prompts()
        self._tasks: set[asyncio.Task[None]] = set()
        self._gate = SamplingGate(lets_samples_run=self.train.partial_rollout_enable)
        self._changed = asyncio.Event()
        self._lags: Counter[int] = Counter()
        self._waiting = 0  # finished prompts that the last step left waiting

    @property
    def exhausted(self) -> bool:
        """True if no prompt is left to draw, and no prompt is in progress or waiting."""
        return self.consumed >= self.total_prompts and not self.held

    def _prompts(self) -> Iterator[Prompt]:
        while self.consumed < self.total_prompts:
            for prompt in self.rest_of_epoch(self.consumed):
                self.consumed += 1
                yield prompt

    def resume(self, *, step: int, consumed: int, folder: Path) -> None:
        """Resume after `step`, when about `consumed` prompts had been drawn.

        The exact number is stored in `folder`, which was written by `save`. Unfinished samples are
        generated again with the current weights.
        """
        files = EpisodeFolder(folder)
        run = files.header("step", step)["run"]
        self.step = step
        self.version = step
        self.consumed = run.get("consumed", consumed)
        groups: dict[int, Group] = defaultdict(list)
        for episode in files.read("step", step):
            groups[episode.prompt.index].append(episode)
        for index, version, *unpublished in run["held"]:  # older checkpoints have pairs
            prompt = self.prompt(index)  # the prompt with its label from the dataset
            group = [replace(episode, prompt=prompt) for episode in groups[index]]
            in_flight = PromptInFlight(version=step, prompt=prompt)
            if group:
                in_flight.version = version
                in_flight.unpublished = sum(unpublished)
                in_flight.finish(group)
            else:
                self._unfinished_at_resume.append(in_flight)
            self.held.append(in_flight)

    def save(self, folder: Path) -> None:
        """Write the prompts that have started but have not been trained on yet, with their samples.

        Only finished samples are written. If all samples of a prompt failed, the samples are
        dropped, because the user may fix the reward function before resuming.
        """
        held, consumed = self.loop.run(
            self._snapshot(),
            self.train.step_timeout,
            doing="list the samples for a checkpoint",
            hint=SLOW_STEP,
        )
        drawn: list[tuple[int, int, int]] = []
        episodes: Group = []
        for each in held:
            drawn.append((each.prompt.index, each.version, each.unpublished))
            if each.failed < len(each.group):
                episodes += each.group
        run = {"held": drawn, "consumed": consumed}
        EpisodeFolder(folder).write("step", self.step, episodes, run=run)

    async def _snapshot(self) -> tuple[list[PromptInFlight], int]:
        return [replace(each) for each in self.held], self.consumed

    def __iter__(self) -> Iterator[list[Trajectory]]:
        while not self.exhausted:
            groups = None
            while groups is None:  # each iteration waits until another sample finishes
                groups = self.loop.run(self._progress(), self.train.step_timeout, doing=NEXT_GROUP)
            yield list(chain.from_iterable(groups))

    async def _progress(self) -> list[Group] | None:
        """Return the next step's groups.

        If the groups are not ready, await a change and return None.
        """
        self._start()
        places = self.rule.next_step(
            self.held, self.version, last=self.consumed >= self.total_prompts
        )
        if places is None and self._has_lost_too_many:
            # The training loop reports the errors.
            places = [place for place, each in enumerate(self.held) if each.finished]
        if places is None:
            await self._wait()
            return None
        taken = self._take(places)
        self._start()
        return [each.group for each in taken]

    async def _wait(self) -> None:
        """Wait until a prompt finishes, and reraise any error from generation."""
        await self._changed.wait()
        self._changed.clear()
        done = {task for task in self._tasks if task.done()}
        self._tasks -= done
        await asyncio.gather(*done)

    def _take(self, places: list[int]) -> list[PromptInFlight]:
        """Remove the held prompts at the indices `places`, and count them as one step."""
        taken = [self.held[place] for place in places]
        self.held = [each for place, each in enumerate(self.held) if place not in places]
        self._waiting = sum(each.finished for each in self.held)
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
        """True if so many finished samples have failed that the training loop is certain to raise.

        In that case, no more prompts are drawn.
        """
        failed = sum(each.failed for each in self.held)
        samples = sum(len(each.group) for each in self.held)
        planned = max(samples, self.rule.batch * self.spec.n_samples)
        return self.errors.exceeded_by(failed, of=planned)

    def _start(self) -> None:
        """Start generating as many prompts as the capacity allows.

        In a resumed run, prompts that were unfinished at the checkpoint come first.
        """
        if self._gate.is_closed or self._has_lost_too_many:
            return
        starting = self._unfinished_at_resume
        self._unfinished_at_resume = []
        for prompt in islice(self._left, self.rule.room(self.held)):
            fresh = PromptInFlight(version=self.version, prompt=prompt)
            starting.append(fresh)
            self.held.append(fresh)
        for each in starting:
            self._tasks.add(asyncio.ensure_future(self._generate(each)))

    async def _generate(self, in_flight: PromptInFlight) -> None:
        """Generate and score the samples of a prompt. A rejected prompt is replaced immediately."""
        self._gate.enter(in_flight.prompt)
        request = Request(
            spec=self.spec,
            step=self.step + 1,
            on_group=self.score_and_filter,
            sampled=self._gate.leave,
        )
        try:
            async for group in self.generator.stream([in_flight.prompt], request, groups=1):
                in_flight.finish(group)
                if in_flight.filtered:
                    self._start()
        finally:
            self._gate.leave(in_flight.prompt)
            self._changed.set()

    @contextmanager
    def publishing(self, version: int) -> Iterator[bool]:
        """Keep new prompts from starting until the block exits.

        Without --train.partial_rollout_enable, no tokens are generated inside the block. Yields
        False if the process is asked to terminate while samples are still being generated; in that
        case, the caller must not publish. If the block fails or the process must terminate, the run
        is about to end, so no prompt is started again.
        """
        is_quiet = self.loop.run(
            self._gate.close(),
            self.train.step_timeout,
            doing="finish the samples in progress before a publication of weights",
        )
        yield is_quiet
        if is_quiet:
            self.loop.run(
                self._continue(version),
                self.train.step_timeout,
                doing="start the next prompts after the publication of weights",
                hint=SLOW_STEP,
            )

    async def _continue(self, version: int) -> None:
        # Steps that did not change the weights also increment the version.
        skipped = version - self.version - 1
        for each in self.held:
            each.version += skipped
            each.unpublished += skipped
        self._gate.open()
        self.version = version
        self._start()

    def close(self) -> None:
        """Cancel the samples in progress."""
        self.loop.run(self._cancel(), CLOSE_TIMEOUT_S, doing=CANCEL, hint="")

    async def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def metrics(self) -> dict[str, Metric]:
        """Return metrics since the last call: generation cost, sample age and waiting prompts."""
        lags = self._lags
        self._lags = Counter()
        metrics = super().metrics()
        samples = lags.total()
        for lag in sorted(lags):
            metrics[f"rollout/lag_{lag}"] = Mean(lags[lag], samples)
        unfinished = sum(not each.finished for each in self.held)
        metrics["rollout/lag_mean"] = Mean(sum(lags.elements()), samples)
        metrics["rollout/lag_max"] = Max(max(lags, default=0))
        metrics["rollout/waiting_prompts"] = Last(self._waiting)
        metrics["rollout/prompts_under_way"] = Last(unfinished)
        return metrics
