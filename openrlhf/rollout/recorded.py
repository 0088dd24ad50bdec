"""Generators that write episodes to disk or read episodes from disk.

Each of the two generators can replace `RolloutGenerator`.
"""

from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from openrlhf.core.trajectory import Prompt, Trajectory
from openrlhf.data.errors import DataError
from openrlhf.observability.metrics import Metric
from openrlhf.reporting import notice
from openrlhf.rollout.background import RolloutError
from openrlhf.rollout.episode_files import EpisodeFolder, Kind
from openrlhf.rollout.generator import Generator, Group, Request, in_prompt_order


class DumpingGenerator:
    """A generator that writes every group of another generator to disk.

    Groups are written before reward models and filters process them. A run that replays the
    episodes must have the identity `run`. If a file cannot be written, for example because the disk
    is full, the failure is reported once and training continues without the file. With `required`,
    the episodes are the result of the run, so the failure raises RolloutError.
    """

    def __init__(
        self,
        generator: Generator,
        folder: EpisodeFolder,
        *,
        run: Mapping[str, Any],
        required: bool = False,
    ) -> None:
        self.generator = generator
        self.folder = folder
        self.run = run
        self.required = required
        self._has_failed = False  # True if the last file could not be written
        self._file: tuple[Kind, int] | None = None  # the file being written
        self._episodes: list[Trajectory] = []  # the episodes in that file

    async def stream(
        self,
        prompts: Iterable[Prompt],
        request: Request,
        *,
        groups: int,
        at_once: int | None = None,
    ) -> AsyncGenerator[Group]:
        """Yield the other generator's groups.

        Each stream adds its groups to the file of its training step or evaluation.
        """
        kind: Kind = "step"
        if request.spec.purpose == "eval":
            kind = "eval"
        if self._file != (kind, request.step):
            self._file = (kind, request.step)
            self._episodes = []
        sampled: list[Group] = []

        async def recorded(group: Group) -> Group:
            sampled.append(group)
            return await request.on_group(group)

        recording = replace(request, on_group=recorded)
        stream = self.generator.stream(prompts, recording, groups=groups, at_once=at_once)
        try:
            async with aclosing(stream):  # otherwise, it would be closed only after this stream
                async for group in stream:
                    yield group
        finally:
            if sampled:
                self._episodes += in_prompt_order(sampled)
                self._write(kind, request.step)

    def _write(self, kind: Kind, step: int) -> None:
        try:
            self.folder.write(kind, step, self._episodes, run=self.run)
        except OSError as error:
            file = self.folder.file(kind, step)
            if self.required:
                raise RolloutError(
                    f"--rollout.dump_dir: cannot write {file}: {error.strerror or error}. Free "
                    "disk space, or choose another folder."
                ) from error
            if not self._has_failed:
                notice(
                    f"Cannot write {file}: {error.strerror or error}. Training continues, but this "
                    "step and later ones cannot be replayed. Free disk space."
                )
            self._has_failed = True
        else:
            self._has_failed = False

    async def rest(self) -> None:
        """Free device memory."""
        await self.generator.rest()

    def metrics(self) -> dict[str, Metric]:
        """Return the other generator's metrics."""
        return self.generator.metrics()


class ReplayGenerator:
    """A generator that reads an earlier run's samples and ends after the folder's last step.

    Raises DataError if the files are damaged or have different prompts.
    """

    def __init__(self, folder: EpisodeFolder) -> None:
        self.folder = folder
        self._file = Path()  # the file that `_samples` were read from
        self._samples: dict[int, Group] = {}  # by prompt

    async def stream(
        self,
        prompts: Iterable[Prompt],
        request: Request,
        *,
        groups: int,
        at_once: int | None = None,
    ) -> AsyncGenerator[Group]:
        """Yield groups as `Generator.stream` does, in prompt order."""
        if request.step > self.folder.last_step:
            return
        file = self.folder.file("step", request.step)
        if file != self._file:
            episodes = self.folder.read("step", request.step)
            self._samples = {}
            for index, group in groupby(episodes, key=lambda episode: episode.prompt.index):
                self._samples[index] = list(group)
            self._file = file
        for prompt in prompts:
            group = await request.on_group(self._samples_of(prompt))
            if not group[0].filtered:
                groups -= 1
            yield group
            if not groups:
                return

    async def rest(self) -> None:
        """Do nothing, because no engine is running."""

    def metrics(self) -> dict[str, Metric]:
        """Return no metrics, because nothing was generated."""
        return {}

    def _samples_of(self, prompt: Prompt) -> Group:
        samples = self._samples.get(prompt.index)
        if not samples:
            raise DataError(
                f"{self._file} has no sample of prompt {prompt.index}, which this run needs. A "
                "replay must use the prompts of the run that wrote the file: set the same "
                "--rollout.batch_size, --data.prompt_dataset, --train.seed and, with dynamic "
                "filtering, the same range and reward models."
            )
        written = samples[0].prompt
        if (written.text, written.tokens) != (prompt.text, prompt.tokens):
            raise DataError(
                f"{self._file}: prompt {prompt.index} is {written.text!r:.100} with the tokens "
                f"{written.tokens[:8]}… in the file, but {prompt.text!r:.100} with the tokens "
                f"{prompt.tokens[:8]}… in this run. Use the same --data.prompt_dataset, columns, "
                "template and tokenizer."
            )
        # Use this run's label and images, which may not be JSON serializable.
        return [replace(sample, prompt=prompt) for sample in samples]
