"""Logs a run's metrics and samples to the run folder, the trackers and the terminal."""

import os
import threading
from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest

from openrlhf import reporting
from openrlhf.config.commands import RecordedCommand
from openrlhf.config.options import changed_flags, dump_yaml
from openrlhf.core.trajectory import Failure, Trajectory
from openrlhf.locks import running_command
from openrlhf.observability.display import Display
from openrlhf.observability.health import Health
from openrlhf.observability.log_file import report_failed_write
from openrlhf.observability.report import report_run
from openrlhf.observability.run_folder import (
    METRICS,
    REPORT,
    RESOLVED,
    RunFolder,
    read_lines,
    read_notices,
    read_text,
    sample_row,
)
from openrlhf.observability.trackers import make_trackers

# Maximum number of each kind of episode (kept, filtered, failed) in samples.jsonl per step.
SAMPLES_PER_STEP = 16
SAMPLES_PER_EVALUATION = 4  # always from the same prompts, so that evaluations can be compared


class Recorder:
    """Logger of a run's metrics and samples. Only the main process has a recorder.

    `resume_step` is the step from which a resumed run continues. The run reuses its folder
    `run_dir`, without the lines logged after that step.
    """

    def __init__(
        self, config: RecordedCommand, run_dir: str, *, resume_step: int | None = None
    ) -> None:
        self.display = Display(quiet=config.run.quiet, json=config.run.json)
        self.folder = RunFolder(run_dir, resume_step=resume_step)
        if resume_step is not None:
            self._report_resume(config, run_dir, resume_step)
        elif self.folder.earlier:
            self.display.note(
                f"Moved the files of an earlier run from {run_dir} to {self.folder.earlier}."
            )
        resolved = dump_yaml(config)
        start = [running_command(), *reporting.notices]
        self.folder.write_config(dump_yaml(config, given_only=True), resolved, start)
        self.trackers = make_trackers(
            config.logger,
            settings={"config": resolved},
            run_dir=self.folder.path,
            resume_step=resume_step,
        )
        self.logging_steps = config.logger.logging_steps
        self._shown_failures = set[Failure | None]()
        self._close_lock = threading.Lock()  # any thread may close the recorder
        self._closed = False
        # A resumed run has lines from before the resume.
        self.health = Health(read_notices(self.folder.path))
        self.health.read(read_lines(self.folder.path / METRICS))
        self._last_step = resume_step or 0

    def _report_resume(self, config: RecordedCommand, run_dir: str, resume_step: int) -> None:
        """Print the step and folder of a resumed run, and the flags that have changed."""
        self.display.note(f"Continuing after step {resume_step} in {run_dir}.")
        if "run.dir" in config.given and os.path.abspath(config.run.dir) != run_dir:
            self.display.note(
                f"Ignoring --run.dir {config.run.dir}: a resumed run keeps its folder."
            )
        changed = changed_flags(read_text(self.folder.path / RESOLVED), config)
        if changed:
            reporting.notice(f"This run resumes with changed flags: {', '.join(changed)}.")

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Check the metrics of a training step, and log them if the step is due.

        A step with a notice is always logged, so that the run folder has the notice's numbers.
        """
        notices = self.health.see(step, values)
        if notices or step % self.logging_steps == 0:
            self.display.step(step, values)
            self._write(step, values)
        self._report_notices(step, notices)

    def evaluation(
        self, step: int, values: Mapping[str, float], trajectories: Sequence[Trajectory] = ()
    ) -> None:
        """Log the metrics of an evaluation of the weights after `step`, and some samples.

        The logged samples are one sample for each of the first prompts and some failed samples.
        """
        self.display.evaluation(step, values)
        self.log(step, values)
        first: dict[int, Trajectory] = {}
        for trajectory in trajectories:
            if not trajectory.failed:
                first.setdefault(trajectory.prompt.index, trajectory)
        chosen = [first[prompt] for prompt in sorted(first)[:SAMPLES_PER_EVALUATION]]
        chosen += failed_of_every_kind(trajectories)[:SAMPLES_PER_EVALUATION]
        self.folder.log_samples(sample_row(step, each, evaluation=True) for each in chosen)
        self._show_errors(f"Evaluation after step {step}", trajectories)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log metrics printed by the caller, and print notices about these metrics."""
        self._write(step, values)
        self._report_notices(step, self.health.see(step, values))

    def _report_notices(self, step: int, notices: Sequence[str]) -> None:
        self._last_step = step
        self.folder.log_notices(step, notices)
        self.display.notice(*notices)

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        self.folder.log_metrics(step, values)
        self.trackers.log(step, values)

    def samples(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Log some of a step's episodes, including filtered episodes and all kinds of failures."""
        chosen = failed_of_every_kind(trajectories)[:SAMPLES_PER_STEP]
        for is_filtered in (True, False):
            finished = [
                each for each in trajectories if not each.failed and each.filtered is is_filtered
            ]
            chosen = finished[:SAMPLES_PER_STEP] + chosen
        rows = [sample_row(step, trajectory) for trajectory in chosen]
        self.folder.log_samples(rows)
        self._show_errors(f"Step {step}", trajectories)
        if rows:
            text = rows[0]["prompt"] + rows[0]["response"]
            self.trackers.log_samples(step, text, rows[0]["reward"])

    def close(self) -> None:
        """Write the report and restore the terminal. Further calls do nothing."""
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
            # A run that resumes from the last step deletes the notices of the end.
            self._report_notices(self._last_step + 1, self.health.end())
            self.display.close()
            self.trackers.close()
            try:
                self.display.note(f"report: {report_run(self.folder.path)}")
            except OSError as error:
                report_failed_write(self.folder.path / REPORT, error)
            self.folder.close()

    def _show_errors(self, when: str, trajectories: Sequence[Trajectory]) -> None:
        """Print the run's first error of each failure kind."""
        for trajectory in trajectories:
            if trajectory.error is None or trajectory.failure in self._shown_failures:
                continue
            self._shown_failures.add(trajectory.failure)
            kind = f" ({trajectory.failure})" if trajectory.failure else ""
            summary = _summarize_error(trajectory.error)
            self.display.notice(
                f"{when}: an episode has an error{kind}; see samples.jsonl for details: {summary}"
            )


def _summarize_error(error: str) -> str:
    """Return the first and the last line of an error message or traceback."""
    lines = error.strip().splitlines() or ["no message"]
    return " ".join(dict.fromkeys([lines[0], lines[-1].strip()]))


def failed_of_every_kind(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Return the failed episodes, cycling through the failure kinds."""
    by_kind: dict[Failure | None, list[Trajectory]] = {}
    for trajectory in trajectories:
        if trajectory.failed:
            by_kind.setdefault(trajectory.failure, []).append(trajectory)
    rounds = zip_longest(*by_kind.values())
    return list(filter(None, chain.from_iterable(rounds)))
