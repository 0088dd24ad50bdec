"""Generators that write episodes down, and that give those written earlier. Either stands where `RolloutGenerator` does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any, Protocol

from openrlhf.data.errors import DataError
from openrlhf.observability.metrics import Metric
from openrlhf.rollout.episode_files import EpisodeFolder, Kind
from openrlhf.rollout.generator import Rejects, SamplingSpec
from openrlhf.trajectory import Prompt, Trajectory


class Generator(Protocol):
    """Gives prompts their samples; see `RolloutGenerator.rollout`."""

    def rollout(
        self,
        prompts: Iterable[Prompt],
        spec: SamplingSpec,
        *,
        groups: int | None = None,
        rejects: Rejects = ...,
        may_end_early: bool = False,
    ) -> list[Trajectory]: ...

    def metrics(self) -> dict[str, Metric]: ...


class DumpingGenerator:
    """Writes down all that another generator gives, before anybody looks at it.

    `step`: steps the run has made. `run`: what a run that replays the files has to have in common with this one.
    """

    def __init__(
        self, generator: Generator, folder: EpisodeFolder, step: Callable[[], int], *, run: Mapping[str, Any]
    ) -> None:
        self.generator, self.folder, self.step, self.run = generator, folder, step, run
        self._file: tuple[Kind, int] | None = None
        self._episodes: list[Trajectory] = []  # of that file

    def rollout(self, prompts: Iterable[Prompt], spec: SamplingSpec, **options: Any) -> list[Trajectory]:
        """As the other generator. A step, or an evaluation, may take several calls: its file grows with each."""
        episodes = self.generator.rollout(prompts, spec, **options)
        file: tuple[Kind, int] = ("eval", self.step()) if spec.purpose == "eval" else ("step", self.step() + 1)
        if file != self._file:
            self._file, self._episodes = file, []
        if episodes:
            self._episodes += episodes
            self.folder.write(*file, self._episodes, run=self.run)
        return episodes

    def metrics(self) -> dict[str, Metric]:
        """Those of the other generator."""
        return self.generator.metrics()


class ReplayGenerator:
    """Gives the prompts of a step the samples that were written down for them; nothing once the folder has no further step.

    `step`: steps the run has made. Raises DataError where the files are damaged, or are not of these prompts.
    """

    def __init__(self, folder: EpisodeFolder, step: Callable[[], int]) -> None:
        self.folder, self.step = folder, step
        self._read = 0  # the step whose samples are here
        self._samples: dict[int, list[Trajectory]] = {}  # by prompt

    def rollout(
        self,
        prompts: Iterable[Prompt],
        spec: SamplingSpec,
        *,
        groups: int | None = None,
        rejects: Rejects = lambda group: False,
        may_end_early: bool = False,
    ) -> list[Trajectory]:
        """As `RolloutGenerator.rollout`: prompts are taken until the samples of `groups` of them are not rejected."""
        step = self.step() + 1
        if step > self.folder.last_step:
            return []
        if step != self._read:
            episodes = self.folder.read("step", step)
            self._samples = {index: list(group) for index, group in groupby(episodes, key=lambda t: t.prompt.index)}
            self._read = step
        found: list[Trajectory] = []
        taken = 0
        for prompt in prompts:
            samples = self._samples_of(prompt)
            found += samples
            taken += not rejects(samples)
            if taken == groups:
                break
        return found

    def metrics(self) -> dict[str, Metric]:
        """None: nothing was generated."""
        return {}

    def _samples_of(self, prompt: Prompt) -> list[Trajectory]:
        file = self.folder.file("step", self._read)
        samples = self._samples.get(prompt.index)
        if not samples:
            raise DataError(
                f"{file} has no sample of prompt {prompt.index}, which this run draws for step {self._read}. A replay takes "
                "the prompts of the run that wrote it: --rollout.batch_size, --data.prompt_dataset, --train.seed and, with "
                "dynamic filtering, its range and the reward models have to be the same."
            )
        written = samples[0].prompt
        if (written.text, written.tokens) != (prompt.text, prompt.tokens):
            differing = (
                f"is {written.text!r:.100} there and {prompt.text!r:.100} in this run: use the same --data.prompt_dataset, "
                "columns and template"
                if written.text != prompt.text
                else f"has other tokens there than in this run ({written.tokens[:8]}… and {prompt.tokens[:8]}…): use the "
                "tokenizer that it was written with"
            )
            raise DataError(f"{file}: prompt {prompt.index} {differing}.")
        return [replace(t, prompt=prompt) for t in samples]  # with label and images, which JSON may not express
