"""Flags of `pipeline`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

from openrlhf.config.commands import Command
from openrlhf.config.effects import Effects, Sentences
from openrlhf.config.flags import Section, derived, option, required


# fmt: off
class PipelineRunConfig(Section):
    """Where everything goes."""
    dir: str = derived("Folder of all stages; unset: ./runs/<name of the file>, with --settings behind it.", holds="place", writes="stages")

class PipelineConfig(Command):
    """Stages in a file, one after the other."""
    effects: ClassVar[Effects] = {"!always": ["plugin"]}

    file: str = required("YAML file with the stages; may also be the first word.", metavar="FILE.yaml", holds="place")
    settings: str = option("", "Which settings of the file; unset: its first.")
    dry_run: bool = option(False, "Check everything, say what would run, stop.", saved=False)
    run: PipelineRunConfig = PipelineRunConfig()

    def derived_values(self) -> dict[str, Any]:
        """The folder."""
        name = "-".join([Path(self.file or "").stem, *filter(None, [self.settings])])
        return {"run.dir": self.run.dir or f"./runs/{name}"}

    def mistakes(self) -> Sentences:
        """The file is there."""
        return [*super().mistakes(), (self.file and not os.path.isfile(self.file), "<file> is no file on this machine.")]
