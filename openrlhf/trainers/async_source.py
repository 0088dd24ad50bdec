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
    """A prompt that has started, with its samples when they are finished."""

    prompt: Prompt
    group: Group = field(default_factory=list[Trajectory])
    failed: int = 0  # samples of the group
    unpublished: int = 0  # steps since its start that published nothing

    def finish(self, group: Group) -> None:
        """Note the samples, without what training does not need of them."""
        self.group = [episode.packed() for episode in group]
        self.failed = sum(episode.failed for episode in group)
        self.finished, self.filtered = True, group[0].filtered


@dataclass(eq=False, repr=False)
class AsyncSource(Source):
    """Keeps as many prompts in generation as `Capacity` allows, and gives the loop finished ones.

    Private methods run in the event loop, public ones in the controller's thread. Prompts start in
    order; epochs follow each other without a break. With --train.partial_rollout_enable, samples in
    progress continue with the new weights. Otherwise a publication waits until their last tokens
    are drawn, and every sample has one version. It does not wait for rewards. `consumed`: prompts
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
        self.version = 0  # of the engines' weights
        self.held: list[Started] = []
        self._left = self._prompts()
        self._tasks: set[asyncio.Task[None]] = set()
        self._sampling: dict[
            int, asyncio.Future[None]
        ] = {}  # by prompt; done when its last token is drawn
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
        """Continue after `step`, when about `consumed` prompts had been drawn. `folder`: where
        `save` wrote.

        `save` knows how many exactly. Samples that had not finished are drawn again, with the
        present weights.
        """
        files = EpisodeFolder(folder)
        run = files.header("step", step)["run"]
        self.step, self.version, self.consumed = step, step, run.get("consumed", consumed)
        groups: dict[int, Group] = defaultdict(list)
        for episode in files.read("step", step):
            groups[episode.prompt.index].append(episode)
        for index, version in run["held"]:
            prompt = self.prompt(index)
            begun = Started(version=version if groups[index] else step, prompt=prompt)
            if groups[index]:
                begun.finish(
                    [replace(t, prompt=prompt) for t in groups[index]]
                )  # the label as it is in the data
            self.held.append(begun)

    def save(self, folder: Path) -> None:
        """Write the prompts that have started and not been trained on, with the samples that are
        finished.

        Samples of a prompt that have all failed are not kept: the reward may have been repaired
        when the run goes on.
        """
        held, consumed = self.loop.run(self._snapshot(), self.train.step_timeout)
        episodes = [t for each in held if each.failed < len(each.group) for t in each.group]
        drawn = [(each.prompt.index, each.version) for each in held]
        EpisodeFolder(folder).write(
            "step", self.step, episodes, run={"held": drawn, "consumed": consumed}
        )

    async def _snapshot(self) -> tuple[list[Started], int]:
        return [replace(each) for each in self.held], self.consumed

    def __iter__(self) -> Iterator[list[Trajectory]]:
        while not self.exhausted:
            while (groups := self.loop.run(self._progress(), self.train.step_timeout)) is None:
                pass  # something has finished in time
            yield list(chain.from_iterable(groups))

    async def _progress(self) -> list[Group] | None:
        """The groups of the next step; None if it has to wait for more, and something has changed
        meanwhile.
        """
        self._start()
        places = self.rule.step(self.held, self.version, last=self.consumed >= self.total_prompts)
        if places is None and self._lost:
            places = [
                place for place, each in enumerate(self.held) if each.finished
            ]  # the loop reports the errors
        if places is None:
            await self._changed.wait()
            self._changed.clear()
            done = {task for task in self._tasks if task.done()}
            self._tasks -= done
            await asyncio.gather(*done)  # raises what they raised
            return None
        self._waiting = sum(each.finished for each in self.held) - len(places)
        taken = [self.held[place] for place in places]
        self.held = [each for place, each in enumerate(self.held) if place not in places]
        self.step += any(not each.filtered for each in taken)
        kept = [
            (t, each.unpublished)
            for each in taken
            for t in each.group
            if t.weight_versions and not each.filtered
        ]
        self._lags += Counter(
            self.version - unpublished - min(t.weight_versions) for t, unpublished in kept
        )
        self._start()
        return [each.group for each in taken]

    @property
    def _lost(self) -> bool:
        """Whether too many of the finished samples have failed: no other prompt need be drawn for
        the loop to say so.
        """
        failed, samples = (
            sum(each.failed for each in self.held),
            sum(len(each.group) for each in self.held),
        )
        return self.errors.exceeded_by(
            failed, of=max(samples, self.rule.batch * self.spec.n_samples)
        )

    def _start(self) -> None:
        """Start as many prompts as there is room for; first those of a resumed run that have not
        finished.
        """
        if self._publishing or self._lost:
            return
        again = [each for each in self.held if not (each.finished or self._tasks)]
        prompts = islice(self._left, self.rule.room(self.held))
        fresh = [Started(version=self.version, prompt=prompt) for prompt in prompts]
        self.held += fresh
        self._tasks |= {asyncio.ensure_future(self._generate(each)) for each in again + fresh}

    async def _generate(self, started: Started) -> None:
        """Generate the samples of a prompt, and judge them. A rejected prompt is replaced at once."""
        self._sampling[started.prompt.index] = asyncio.get_running_loop().create_future()
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
        """Start no prompt until the block exits. Without --train.partial_rollout_enable, no token
        is drawn there either.

        Yields False if the process is asked to end while samples are still being drawn: nothing is
        to be published then.
        """
        is_quiet = self.loop.run(self._hold(), self.train.step_timeout)
        yield is_quiet
        if is_quiet:
            self.loop.run(self._go_on(version), self.train.step_timeout)

    async def _hold(self) -> bool:
        self._publishing = True
        if self.train.partial_rollout_enable:
            return True
        while self._sampling and not termination.asked():
            await asyncio.wait(self._sampling.values(), timeout=TERMINATION_CHECK_S)
        return not self._sampling

    async def _go_on(self, version: int) -> None:
        for each in self.held:  # steps that left the weights as they were had versions of their own
            each.version += version - self.version - 1
            each.unpublished += version - self.version - 1
        self._publishing, self.version = False, version
        self._start()

    def close(self) -> None:
        """End the samples under way."""
        self.loop.run(self._cancel(), CLOSE_TIMEOUT_S)

    async def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def metrics(self) -> dict[str, Metric]:
        """The cost of generation, the age of the samples, and the prompts that waited, since the
        last call.
        """
        lags, self._lags = self._lags, Counter[int]()
        number = lags.total()
        return super().metrics() | {
            **{f"rollout/lag_{lag}": Mean(count, number) for lag, count in sorted(lags.items())},
            "rollout/lag_mean": Mean(sum(lag * count for lag, count in lags.items()), number),
            "rollout/lag_max": Max(float(max(lags, default=0))),
            "rollout/waiting_prompts": Last(float(self._waiting)),
            "rollout/prompts_under_way": Last(float(sum(not each.finished for each in self.held))),
        }
