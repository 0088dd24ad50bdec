"""The beginning of a run: its state before the first step, and the record of its memory plan."""

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from openrlhf.checkpoints.manifest import Checkpoint, RunState, StateLayout
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.supervised import SupervisedConfig
from openrlhf.data.first_start import FirstStart
from openrlhf.observability.recorder import Recorder
from openrlhf.observability.run_folder import PLAN
from openrlhf.planning import table
from openrlhf.planning.plan import Plan


def initial_state(
    config: PPOConfig | SupervisedConfig,
    checkpoint: Checkpoint | None,
    first_start: FirstStart,
    *,
    layout: str,
    engines: Mapping[str, StateLayout],
    identity: Mapping[str, Any],
    planned_updates: int = 0,
) -> RunState:
    """Return the state of a run that starts, or that continues `checkpoint` in its run folder.

    `layout` names the flags that determine the layout of `engines`. Raises CheckpointError if the
    run cannot continue the checkpoint.
    """
    start = RunState(
        step=0,
        run_dir=os.path.abspath(config.run.dir),
        started=first_start.moment,
        trained_format=first_start.trained_format,
        engines=engines,
        identity=identity,
        planned_updates=planned_updates,
    )
    if not checkpoint:
        return start
    checkpoint.check_continued_by(start, layout=layout, converts=config.ds.use_universal_ckpt)
    return replace(start, run_dir=checkpoint.state.continued_folder(start.run_dir))


def record_plan(plan: Plan | None, recorder: Recorder) -> None:
    """Print the summary of a plan, if there is one, and write its table to the run folder."""
    if plan:
        recorder.display.note(table.summary(plan))
        recorder.folder.write_lines(PLAN, table.lines(plan))
