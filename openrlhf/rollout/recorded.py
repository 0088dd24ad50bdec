"""Generators that write episodes to disk, and that read episodes from disk. Each can replace
`RolloutGenerator`.
"""

from collections.abc import AsyncGenerator, Iterable, Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any

from openrlhf.core.trajectory import Prompt, Trajectory
from openrlhf.data.errors import DataError
from openrlhf.observability.metrics import Metric
from openrlhf.rollout.episode_files import EpisodeFolder, Kind
from openrlhf.rollout.generator import Generator, Group, Request, in_prompt_order


class DumpingGenerator:
    """Writes every group of another generator to disk, before reward models and filters read the
    group.

    `run`: the identity that a run must have to replay the files.
    """

    def __init__(
        self, generator: Generator, folder: EpisodeFolder, *, run: Mapping[str, Any]
    ) -> None:
        self.generator, self.folder, self.run = generator, folder, run
        self._file: tuple[Kind, int] | None = None
        self._episodes: list[Trajectory] = []  # of that file

    async def stream(
        self,
        prompts: Iterable[Prompt],
        request: Request,
        *,
        groups: int,
        at_once: int | None = None,
    ) -> AsyncGenerator[Group]:
        """The stream of the other generator. The file of a step, or of an evaluation, grows with
        each stream.
        """
        file: tuple[Kind, int] = (
            ("eval" if request.spec.purpose == "eval" else "step"),
            request.step,
        )
        if file != self._file:
            self._file, self._episodes = file, []
        sampled: list[Group] = []

        async def recorded(group: Group) -> Group:
            sampled.append(group)
            return await request.annotated(group)

        try:
            options = {"groups": groups, "at_once": at_once}
            async for group in self.generator.stream(
                prompts, replace(request, annotated=recorded), **options
            ):
                yield group
        finally:
            if sampled:
                self._episodes += in_prompt_order(sampled)
                self.folder.write(*file, self._episodes, run=self.run)

    def metrics(self) -> dict[str, Metric]:
        """The metrics of the other generator."""
        return self.generator.metrics()


class ReplayGenerator:
    """Gives the prompts of a step the samples that an earlier run wrote. After the folder's last
    step there are none.

    Raises DataError if the files are damaged, or have other prompts.
    """

    def __init__(self, folder: EpisodeFolder) -> None:
        self.folder = folder
        self._read = 0  # the step of `_samples`
        self._samples: dict[int, Group] = {}  # by prompt

    async def stream(
        self,
        prompts: Iterable[Prompt],
        request: Request,
        *,
        groups: int,
        at_once: int | None = None,
    ) -> AsyncGenerator[Group]:
        """See `Generator`: the groups come in prompt order."""
        if request.step > self.folder.last_step:
            return
        if request.step != self._read:
            episodes = self.folder.read("step", request.step)
            self._samples = {
                index: list(group)
                for index, group in groupby(episodes, key=lambda t: t.prompt.index)
            }
            self._read = request.step
        for prompt in prompts:
            group = await request.annotated(self._samples_of(prompt))
            groups -= not group[0].filtered
            yield group
            if not groups:
                return

    def metrics(self) -> dict[str, Metric]:
        """No metrics, because nothing was generated."""
        return {}

    def _samples_of(self, prompt: Prompt) -> Group:
        file = self.folder.file("step", self._read)
        samples = self._samples.get(prompt.index)
        if not samples:
            raise DataError(
                f"{file} has no sample of prompt {prompt.index}, which this run draws for step {self._read}. A replay must "
                "draw the prompts of the run that wrote the file: with the same --rollout.batch_size, "
                "--data.prompt_dataset, --train.seed and, with dynamic filtering, the same range and reward models."
            )
        written = samples[0].prompt
        if (written.text, written.tokens) != (prompt.text, prompt.tokens):
            raise DataError(
                f"{file}: prompt {prompt.index} is {written.text!r:.100} with the tokens {written.tokens[:8]}… there, and "
                f"{prompt.text!r:.100} with {prompt.tokens[:8]}… in this run: use the same --data.prompt_dataset, columns, "
                "template and tokenizer."
            )
        return [
            replace(t, prompt=prompt) for t in samples
        ]  # with label and images, which JSON may not express
