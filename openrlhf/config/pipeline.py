"""Configuration of `pipeline`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from openrlhf.config.commands import Command
from openrlhf.config.flags import Section, Unused, option, required, switch, unset


class PipelineRunConfig(Section):
    """Pipeline folder."""

    dir: str = unset(
        "Folder for all stages; unset: ./runs/<file name>, followed by --settings.",
        holds="place",
        writes="stages",
    )


class PipelineConfig(Command):
    """Run the stages in a file one after another."""

    file: str = required(
        "YAML file with the stages; may also be given as the first argument.",
        metavar="FILE.yaml",
        holds="place",
    )
    settings: str = option("", "Name of the settings to use; unset: the first in the YAML.")
    dry_run: bool = switch("Check everything, show what would run, and exit.", saved=False)
    run: PipelineRunConfig = PipelineRunConfig()

    def derived_values(self) -> dict[str, Any]:
        """Return the folder of all stages."""
        name = Path(self.file or "").stem
        if self.settings:
            name += f"-{self.settings}"
        return {"run.dir": self.run.dir or f"./runs/{name}"}

    def violations(self) -> Iterator[str]:
        """Yield a sentence for each mistake in this resolved configuration."""
        yield from super().violations()
        if self.file and not os.path.isfile(self.file):
            yield "<file> is not a file on this machine."

    def unused(self) -> Iterator[Unused]:
        """Yield the flags that have no effect with the current settings."""
        yield Unused(["plugin"], "with this command")
