"""Sends the numbers and samples of a run to the run folder, the trackers and the terminal."""

import os
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count

from openrlhf.config.commands import RecordedCommand
from openrlhf.config.flags import notice
from openrlhf.config.options import changed_flags, dump_yaml
from openrlhf.config.secrets import without_secrets
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
    sample_row,
)
from openrlhf.observability.trackers import make_trackers
from openrlhf.trajectory import Failure, Trajectory

SAMPLES_PER_STEP = (
    16  # episodes of a step that go to samples.jsonl, and as many filtered and as many failed ones
)
SAMPLES_PER_EVALUATION = 4  # one of each of the first prompts, so that evaluations can be compared


class Recorder:
    """Logs the numbers and samples of a run. Only the main process has one.

    `resume_step`: the step that a resumed run continues from. Its folder `run_dir` is continued,
    cut back to that step.
    """

    def __init__(
        self, config: RecordedCommand, run_dir: str, *, resume_step: int | None = None
    ) -> None:
        run, logger = config.run, config.logger
        self.display = Display(quiet=run.quiet, json=run.json)
        self.folder = RunFolder(run_dir, resume_step=resume_step)
        if resume_step is not None:
            self.display.note(f"Continuing after step {resume_step} in {run_dir}.")
            if "run.dir" in config.given and os.path.abspath(config.run.dir) != run_dir:
                self.display.note(
                    f"--run.dir {config.run.dir} is not used: a resumed run continues in its own folder."
                )
            self._compare_flags(config)
        elif self.folder.earlier:
            self.display.note(
                f"The files of an earlier run in {run_dir} are now in {self.folder.earlier}."
            )
        full, place = dump_yaml(config), self.folder.path
        self.folder.write_config(dump_yaml(config, given_only=True), full)
        self.trackers = make_trackers(
            logger, settings={"config": full}, run_dir=place, resume_step=resume_step
        )
        self.logging_steps = logger.logging_steps
        self._shown_failures = set[Failure | None]()
        self._closing = threading.Lock()  # any thread may end the run
        self._closed = False
        self.health = Health()
        self.health.read(read_lines(place / METRICS))  # of the part before a resume

    def _compare_flags(self, config: RecordedCommand) -> None:
        """Print a notice about the flags that differ from those of the run that is continued."""
        file = self.folder.path / RESOLVED
        if not file.is_file():
            return
        changed = changed_flags(file.read_text(encoding="utf-8", errors="replace"), config)
        if changed:
            notice(f"This run continues with different flags than before: {', '.join(changed)}.")

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Log the numbers of a training step."""
        if step % self.logging_steps == 0:
            self.display.step(step, values)
            self.log(step, values)

    def evaluation(
        self, step: int, values: Mapping[str, float], trajectories: Sequence[Trajectory] = ()
    ) -> None:
        """Log the numbers of an evaluation of the weights after `step`, and a sample of each of its
        first prompts.
        """
        self.display.evaluation(step, values)
        self.log(step, values)
        by_prompt = {t.prompt.index: t for t in reversed(trajectories) if not t.failed}
        chosen = [by_prompt[prompt] for prompt in sorted(by_prompt)[:SAMPLES_PER_EVALUATION]]
        chosen += failed_of_every_kind(trajectories)[:SAMPLES_PER_EVALUATION]
        self.folder.log_samples(
            sample_row(step, trajectory, evaluation=True) for trajectory in chosen
        )
        self._show_errors(f"Evaluation after step {step}", trajectories)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log numbers that the caller shows; what is wrong with them is shown here."""
        self.folder.log_metrics(step, values)
        self.trackers.log(step, values)
        self._show(self.health.see(step, values))

    def samples(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Log some episodes of a step, some of the filtered ones, and failed ones of every kind
        with their errors.
        """
        good = [t for t in trajectories if not t.failed and not t.filtered][:SAMPLES_PER_STEP]
        filtered = [t for t in trajectories if not t.failed and t.filtered][:SAMPLES_PER_STEP]
        failed = failed_of_every_kind(trajectories)[:SAMPLES_PER_STEP]
        rows = [sample_row(step, trajectory) for trajectory in [*good, *filtered, *failed]]
        self.folder.log_samples(rows)
        self._show_errors(f"Step {step}", trajectories)
        if rows:
            self.trackers.log_samples(
                step, rows[0]["prompt"] + rows[0]["response"], rows[0]["reward"]
            )

    def close(self) -> None:
        """Write the report and leave the terminal as it was. Do nothing the second time."""
        with self._closing:
            if not self._closed:
                self._close()
            self._closed = True

    def _close(self) -> None:
        self._show(self.health.end())
        self.display.close()
        self.trackers.close()
        try:
            self.display.note(f"report: {report_run(self.folder.path)}")
        except OSError as error:
            report_failed_write(self.folder.path / REPORT, error)
        self.folder.close()

    def _show_errors(self, when: str, trajectories: Sequence[Trajectory]) -> None:
        """Show the first error of each kind of failure of the run."""
        for trajectory in trajectories:
            if trajectory.error is None or trajectory.failure in self._shown_failures:
                continue
            self._shown_failures.add(trajectory.failure)
            lines = trajectory.error.strip().splitlines() or ["no message"]
            error = lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1].strip()}"
            kind = f" ({trajectory.failure})" if trajectory.failure else ""
            self._show(
                [f"{when}: an episode has an error{kind}, in full in samples.jsonl: {error}"]
            )

    def _show(self, notices: Iterable[str]) -> None:
        for sentence in notices:
            self.display.note(f"Notice: {without_secrets(sentence)}")


def failed_of_every_kind(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """The failed episodes: first one of each kind of failure, then another of each."""
    numbers: defaultdict[Failure | None, Iterator[int]] = defaultdict(count)
    return sorted((t for t in trajectories if t.failed), key=lambda t: next(numbers[t.failure]))
