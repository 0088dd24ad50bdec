"""Terminal output of a run: one line per step and evaluation, and notes.

On an interactive terminal, lines scroll above a live progress bar. In files and pipes, and with
--run.quiet, the same lines are printed as plain text. With --run.json, each line is a JSON object.
Only rank 0 has a display.
"""

import sys
import time
from collections.abc import Mapping
from typing import Any, Literal, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.text import Text

from openrlhf.masking import without_secrets
from openrlhf.observability.lines import clock_time, evaluation_line, step_line
from openrlhf.observability.run_folder import json_line
from openrlhf.reporting import NOTICE


class Display:
    """Terminal output for the person who started the run.

    If `live`, lines scroll above a progress bar. If `json`, each line is a JSON object.
    """

    def __init__(
        self, *, quiet: bool = False, json: bool = False, out: TextIO | None = None
    ) -> None:
        """Configure the display from --run.quiet and --run.json.

        `out` defaults to standard output.
        """
        self._out = out or sys.stdout
        self.json = json
        self.live = not quiet and not json and self._out.isatty()
        color_system: Literal["auto"] | None = None
        if self.live:
            color_system = "auto"
        self.console = Console(file=self._out, highlight=False, color_system=color_system)
        self._total_steps = 0
        self._first_step = 0
        self._start_time = time.monotonic()
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
        """Start the progress bar. A resumed run has already completed `done` steps."""
        self._total_steps = total_steps
        self._first_step = done
        self._start_time = time.monotonic()
        self._progress.update(self._bar, total=total_steps, completed=done)
        self._progress.start()
        if 0 < total_steps <= done:
            self.note(f"All {total_steps} steps are already complete.")

    def status(self, text: str, *, done: int | None = None) -> None:
        """Show the current activity beside the progress bar, e.g. "generating 512 episodes".

        `done` is the new number of completed steps; if it is None, the bar is unchanged.
        """
        self._progress.update(self._bar, description=text, completed=done)

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Print the line of a training step, given its metrics by logged name."""
        seconds_left = self._estimate_seconds_left(step)
        if self.json:
            self._write_event(
                "step",
                step=step,
                total_steps=self._total_steps,
                seconds_left=seconds_left,
                **values,
            )
            return
        if self.live:  # the remaining time is shown beside the progress bar
            time_left = ""
            if seconds_left is not None:
                time_left = f"{clock_time(seconds_left)} left"
            self._progress.update(self._bar, completed=step, left=time_left)
            seconds_left = None
        self._print_line(step_line(step, self._total_steps, values, seconds_left=seconds_left))

    def _estimate_seconds_left(self, step: int) -> float | None:
        """Return the remaining time at this process's mean speed, or None before its first step."""
        completed = step - self._first_step
        if completed <= 0:
            return None
        seconds_per_step = (time.monotonic() - self._start_time) / completed
        return seconds_per_step * (self._total_steps - step)

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Print the line of an evaluation of the weights after `step`."""
        if self.json:
            self._write_event("evaluation", step=step, **values)
        else:
            self._print_line(evaluation_line(step, values))

    def note(self, text: str) -> None:
        """Print a message about the run."""
        if self.json:
            self._write_event("note", text=text)
        else:
            self.console.print(Text(text), soft_wrap=True)

    def notice(self, *sentences: str) -> None:
        """Print notices about the run, with secrets masked."""
        for sentence in sentences:
            self.note(f"{NOTICE} {without_secrets(sentence)}")

    def close(self) -> None:
        """Stop the progress bar and restore the terminal."""
        self._progress.stop()

    def _print_line(self, line: Text) -> None:
        if self.live:
            self.console.print(line, no_wrap=True, overflow="ellipsis")
        else:
            self.console.print(line, soft_wrap=True)

    def _write_event(self, event: str, **fields: Any) -> None:
        self._out.write(json_line({"event": event, **fields}))
        self._out.flush()
