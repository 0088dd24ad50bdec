"""What a run prints on the terminal: one line per step and per evaluation, and notes.

On an interactive terminal the lines scroll above a live progress bar. Elsewhere (files, pipes,
--run.quiet) the same lines are plain. With --run.json each line is one JSON object. Only the
process with rank 0 has a display.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.text import Text

from openrlhf.observability.lines import Part, clock_time, evaluation_parts, join_parts, step_parts
from openrlhf.observability.run_folder import json_line


class Display:
    """Prints for the person who started the run. `live`: lines above a progress bar; `json`: one
    object per line.
    """

    def __init__(
        self, *, quiet: bool = False, json: bool = False, out: TextIO | None = None
    ) -> None:
        """`quiet` and `json` are --run.quiet and --run.json; `out` defaults to standard output."""
        self._out = out or sys.stdout
        self.json = json
        self.live = not quiet and not json and self._out.isatty()
        self.console = Console(
            file=self._out, highlight=False, color_system="auto" if self.live else None
        )
        self._total, self._first, self._began = 0, 0, time.monotonic()
        self._progress = Progress(
            SpinnerColumn(style="cyan"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None, complete_style="cyan", finished_style="green"),
            TextColumn("{task.fields[left]}", style="dim"),
            TextColumn("{task.description}", style="dim"),
            console=self.console,
            expand=True,
            disable=not self.live,
        )
        self._bar = self._progress.add_task("starting", left="")

    def begin(self, total_steps: int, *, done: int = 0) -> None:
        """Start counting: a resumed run has `done` of `total_steps` behind it."""
        self._total, self._first, self._began = total_steps, done, time.monotonic()
        self._progress.update(self._bar, total=total_steps, completed=done)
        self._progress.start()
        if 0 < total_steps <= done:
            self.note(f"Nothing is left to do: all {total_steps} are done.")

    def status(self, text: str, *, done: int | None = None) -> None:
        """Show beside the progress bar what the run is doing now: "generating 512 episodes".
        `done`: where the bar is.
        """
        self._progress.update(self._bar, description=text, completed=done)

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Print a training step, given its metrics by their logged names."""
        made = step - self._first
        left = (time.monotonic() - self._began) / made * (self._total - step) if made > 0 else None
        if self.json:
            self._emit("step", step=step, total_steps=self._total, seconds_left=left, **values)
            return
        # A live terminal has the time left beside the bar.
        self._line(step_parts(step, self._total, values, seconds_left=None if self.live else left))
        self._progress.update(
            self._bar, completed=step, left="" if left is None else f"{clock_time(left)} left"
        )

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Print an evaluation of the weights after `step`."""
        if self.json:
            self._emit("evaluation", step=step, **values)
        else:
            self._line(evaluation_parts(step, values))

    def note(self, text: str) -> None:
        """Print a sentence about the run."""
        if self.json:
            self._emit("note", text=text)
        else:
            self.console.print(Text(text), soft_wrap=True)

    def close(self) -> None:
        """Leave the terminal as it was found."""
        self._progress.stop()

    def _line(self, parts: Sequence[Part]) -> None:
        self.console.print(
            join_parts(parts, width=self.console.width if self.live else None), soft_wrap=True
        )

    def _emit(self, event: str, **fields: Any) -> None:
        self._out.write(json_line({"event": event, **fields}))
        self._out.flush()
