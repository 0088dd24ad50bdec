"""Configuration of `pipeline`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from openrlhf.config.commands import Command
from openrlhf.config.flags import Section, Unused, derived, option, required


class PipelineRunConfig(Section):
    """Folder of the pipeline."""

    dir: str = derived(
        "Folder of all stages; unset: ./runs/<name of the file>, followed by --settings.",
        holds="place",
        writes="stages",
    )


class PipelineConfig(Command):
    """Stages in a file, one after the other."""

    file: str = required(
        "YAML file with the stages; may also be the first word.", metavar="FILE.yaml", holds="place"
    )
    settings: str = option("", "Name of the settings to use; unset: the first in the YAML.")
    dry_run: bool = option(False, "Check everything, show what would run, and stop.", saved=False)
    run: PipelineRunConfig = PipelineRunConfig()

    def derived_values(self) -> dict[str, Any]:
        """Return the folder of all stages."""
        name = Path(self.file or "").stem
        if self.settings:
            name += f"-{self.settings}"
        return {"run.dir": self.run.dir or f"./runs/{name}"}

    def violations(self) -> Iterator[str]:
        """Yield what is wrong with this resolved configuration."""
        yield from super().violations()
        if self.file and not os.path.isfile(self.file):
            yield "<file> is not a file on this machine."

    def unused(self) -> Iterator[Unused]:
        """Yield the flags without an effect under these values."""
        yield Unused(["plugin"], "with this command")
