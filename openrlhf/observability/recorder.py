"""Where a run's numbers go: run folder, trackers and terminal, one call each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from openrlhf.config.commands import RecordedCommand
from openrlhf.config.options import dump_yaml
from openrlhf.observability.display import Display
from openrlhf.observability.report import report_run
from openrlhf.observability.run_folder import RunFolder, SampleRow
from openrlhf.observability.trackers import make_trackers
from openrlhf.trajectory import Failure, Trajectory

SAMPLES_PER_STEP = 16  # episodes of a step that go to samples.jsonl; of filtered and of failed ones as many again


class Standing(Protocol):
    """Where a run that is resumed stands."""

    @property
    def step(self) -> int: ...

    @property
    def run_dir(self) -> str: ...


class Recorder:
    """Writes what a run measures and samples. Belongs to the main process.

    `resumed`: the state a resumed run continues from; its folder is continued, cut back to that step.
    """

    def __init__(self, config: RecordedCommand, *, resumed: Standing | None = None) -> None:
        run, logger = config.run, config.logger
        self.display = Display(quiet=run.quiet, json=run.json)
        if resumed:
            self.folder = RunFolder(resumed.run_dir)
            self.folder.truncate_to(resumed.step)
            self.display.note(f"Continuing after step {resumed.step}, in {resumed.run_dir}.")
        else:
            self.folder = RunFolder.create(run.dir)
            if self.folder.earlier:
                self.display.note(f"What an earlier run left in {run.dir} is now in {self.folder.earlier}.")
        resolved = dump_yaml(config)
        self.folder.write_config(dump_yaml(config, given_only=True), resolved)
        self.trackers = make_trackers(
            logger,
            settings={"config": resolved},
            run_dir=self.folder.path,
            resume_step=resumed.step if resumed else None,
        )
        self.logging_steps = logger.logging_steps

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """The numbers of a training step."""
        if step % self.logging_steps == 0:
            self.log(step, values)
            self.display.step(step, values)

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """The numbers of an evaluation of the weights after `step`."""
        self.log(step, values)
        self.display.evaluation(step, values)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers that are shown elsewhere."""
        self.folder.log_metrics(step, values)
        self.trackers.log(step, values)

    def samples(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Some episodes of a step, some of the filtered ones, and failed ones of every kind with their errors."""
        good = [t for t in trajectories if not t.failed and not t.filtered][:SAMPLES_PER_STEP]
        filtered = [t for t in trajectories if not t.failed and t.filtered][:SAMPLES_PER_STEP]
        failed = _kinds_in_turn([t for t in trajectories if t.failed])[:SAMPLES_PER_STEP]
        self._log_samples(step, [*good, *filtered, *failed])

    def _log_samples(self, step: int, trajectories: Iterable[Trajectory]) -> None:
        rows = [SampleRow.of(step, trajectory) for trajectory in trajectories]
        self.folder.log_samples(rows)
        if rows:
            self.trackers.log_samples(step, rows[0].prompt + rows[0].response, rows[0].reward)

    def close(self) -> None:
        """Write the report and leave the terminal as it was."""
        self.display.close()
        self.trackers.close()
        self.folder.close()
        report = report_run(self.folder.path)
        self.display.note(f"report: {report}")


def _kinds_in_turn(failed: Sequence[Trajectory]) -> list[Trajectory]:
    """The first of each kind of failure, then the second of each, and so on."""
    seen: Counter[Failure | None] = Counter()

    def turn(trajectory: Trajectory) -> int:
        seen[trajectory.failure] += 1
        return seen[trajectory.failure]

    return sorted(failed, key=turn)
