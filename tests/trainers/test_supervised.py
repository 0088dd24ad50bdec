"""Tests for the order of rows in the offline loop.

Every epoch has only full batches, and a resumed run processes the remaining rows. An evaluation
counts each row once, on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from openrlhf import termination
from openrlhf.checkpoints.manifest import Checkpoint, CheckpointError, RunState, StateLayout
from openrlhf.config.shared import CheckpointConfig, DeepSpeedConfig, TrainConfig
from openrlhf.config.supervised import RMConfig
from openrlhf.core.batches import TokenRows
from openrlhf.observability.metrics import Mean, Metric
from openrlhf.trainers.supervised import SupervisedTrainer, layout_of
from openrlhf.trainers.tasks import OfflineTask
from openrlhf.training.layout import RankLayout
from tests.checkpoints.kept import checkpoints_in
from tests.tiny import character_tokenizer


class Numbers:
    """A dataset in which each row is its own index."""

    summary = "numbers"

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class CountingTask(OfflineTask[Any, int, TokenRows]):
    """A task without models that records evaluation results and the rows of each forward pass."""

    rows = load_model = None  # pyright: ignore

    def __init__(self) -> None:
        super().__init__(RMConfig())
        self.forwards: list[list[int]] = []
        self.numbers: Mapping[str, float] = {}

    def collate(self, rows: Sequence[int]) -> TokenRows:
        return TokenRows.from_lists([[row] for row in rows], [[True] for _ in rows])

    def counts(self, micro: TokenRows) -> dict[str, float]:
        return {"rows": float(micro.num_rows)}

    def loss(
        self, model: Any, micro: TokenRows, totals: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Metric]]:
        self.forwards.append(micro.tokens.tolist())
        return torch.zeros(()), {"mean": Mean(float(micro.tokens.sum()), micro.num_rows)}

    def evaluation_names(self, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        return dict(metrics)

    def evaluated(self, model: nn.Module, numbers: Mapping[str, float]) -> None:
        self.numbers = numbers


class OneOfMany:
    """The strategy of a single rank, in which collectives return only this rank's values."""

    device = torch.device("cpu")
    is_main = False

    def __init__(self, rank: int, ranks: int, stage: int) -> None:
        self.dp_rank, self.dp_size, self.config = rank, ranks, DeepSpeedConfig(zero_stage=stage)
        self.layout = RankLayout(dp=ranks)
        self.reductions = 0

    def all_reduce(self, values: Sequence[float], op: str = "sum") -> list[float]:
        self.reductions += 1
        return [float(value) for value in values]

    def gather(self, value: Any) -> list[Any]:
        return [value]


class NoEngine:
    """An engine that is never called."""

    module = nn.Linear(1, 1)
    evaluating = staticmethod(nullcontext)

    def __init__(self, strategy: OneOfMany) -> None:
        self.strategy = strategy


def trainer(
    folder: Path,
    task: CountingTask,
    *,
    rows: int = 13,
    rank: int = 0,
    ranks: int = 1,
    stage: int = 2,
) -> SupervisedTrainer[int, TokenRows]:
    train = TrainConfig(batch_size=4, micro_batch_size=2, max_epochs=3, seed=5)
    task.config = RMConfig(train=train, ckpt=CheckpointConfig(path=str(folder)))
    return SupervisedTrainer(
        task,
        NoEngine(OneOfMany(rank, ranks, stage)),  # pyright: ignore[reportArgumentType]
        tokenizer=character_tokenizer(),
        train_rows=Numbers(rows),
        eval_rows=Numbers(rows),
        checkpoints=checkpoints_in(folder),
        recorder=None,
        start=RunState(step=0, run_dir=str(folder)),
    )


def batches(made: SupervisedTrainer[int, TokenRows], *, from_step: int = 0) -> list[list[int]]:
    """Return the rows of every remaining optimizer step, in order."""
    made.step = from_step
    seen = []
    for window in made.windows():
        assert all(micro.num_rows <= 2 for micro in window)
        seen.append([row for micro in window for row in micro.tokens.tolist()])
        made.step += 1
    return seen


def test_every_epoch_has_full_batches_of_distinct_rows_in_its_own_order(
    tmp_path: Path,
) -> None:
    steps = batches(trainer(tmp_path, CountingTask()))
    assert [len(step) for step in steps] == [4] * 9
    epochs = [sum(steps[i : i + 3], start=list[int]()) for i in (0, 3, 6)]
    assert all(len(set(epoch)) == 12 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


@pytest.mark.parametrize("step", range(10))
def test_run_resumed_at_any_step_trains_on_the_remaining_rows(tmp_path: Path, step: int) -> None:
    made = trainer(tmp_path, CountingTask())
    assert batches(made, from_step=step) == batches(made)[step:]


def test_rows_of_a_step_do_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    alone = batches(trainer(tmp_path, CountingTask()))
    ranks = [batches(trainer(tmp_path, CountingTask(), rank=r, ranks=2)) for r in range(2)]
    assert [sorted(a + b) for a, b in zip(*ranks, strict=True)] == [sorted(step) for step in alone]


@pytest.mark.parametrize("rows", [1, 6, 13])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_evaluation_counts_every_row_once(tmp_path: Path, rows: int, ranks: int) -> None:
    seen: list[int] = []
    for rank in range(ranks):
        task = CountingTask()
        trainer(tmp_path, task, rows=rows, rank=rank, ranks=ranks).evaluate()
        seen += [row for forward in task.forwards for row in forward]
    assert set(seen) == set(range(rows))
    # Ranks with fewer rows also run row 0, but do not count it.
    assert all(seen.count(row) == 1 for row in range(1, rows))


def test_evaluation_is_a_mean_over_rows_if_the_last_micro_batch_is_short(
    tmp_path: Path,
) -> None:
    task = CountingTask()
    trainer(tmp_path, task, rows=13).evaluate()
    assert task.numbers == {"mean": pytest.approx(6.0)}


@pytest.mark.parametrize("rows", [1, 6, 13])
@pytest.mark.parametrize("stage", [2, 3])
def test_every_rank_runs_as_many_forward_passes_as_the_rank_with_the_most_rows(
    tmp_path: Path, rows: int, stage: int
) -> None:
    """If a rank ran fewer forward passes, the other ranks would wait for it.

    The other ranks would wait in a ZeRO-3 forward pass or in the check for an interruption.
    """
    forwards = set()
    for rank in range(3):
        task = CountingTask()
        trainer(tmp_path, task, rows=rows, rank=rank, ranks=3, stage=stage).evaluate()
        forwards.add(len(task.forwards))
        own = [row for row in range(rows) if row % 3 == rank]
        assert task.numbers.get("mean") == (pytest.approx(sum(own) / len(own)) if own else None)
    assert len(forwards) == 1


def test_evaluation_moves_a_micro_batch_to_the_device_once_if_no_first_pass_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = CountingTask()
    devices: list[Any] = []

    def to(rows: TokenRows, device: Any) -> TokenRows:
        devices.append(device)
        return rows

    monkeypatch.setattr(TokenRows, "to", to)
    trainer(tmp_path, task, rows=8).evaluate()
    assert devices == [OneOfMany.device] * len(task.forwards)


@pytest.mark.parametrize("after", range(4))
def test_evaluation_stops_after_the_forward_pass_in_which_termination_is_requested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    task = CountingTask()
    made = trainer(tmp_path, task, rows=8)
    monkeypatch.setattr(termination, "asked", lambda: 143 if len(task.forwards) >= after else 0)
    made.evaluate()
    assert len(task.forwards) == after and not task.numbers
    assert made.best.evaluated_at == -1  # a resumed run evaluates again
    # Measuring the exported weights cannot be interrupted.
    assert made.measure() == {"mean": pytest.approx(3.5)}


def test_evaluation_checks_for_interruption_once_per_forward_pass(tmp_path: Path) -> None:
    task = CountingTask()
    made = trainer(tmp_path, task, rows=8)
    made.evaluate()
    strategy: Any = made.strategy
    assert strategy.reductions == len(task.forwards) == 4
    made.measure()
    assert strategy.reductions == 4


# ---- which runs can resume from a checkpoint

IDENTITY = {
    "task": "sft",
    "--train.batch_size": 4,
    "rows of --data.dataset": "13, 5ac3",
    "--train.seed": 42,
}


def checkpoint_of(*, world_size: int = 1, param_dtype: str = "bf16", **changes: Any) -> Checkpoint:
    return Checkpoint(
        directory=Path("checkpoints"),
        tag="global_step4",
        nonce="",
        sequence=1,
        places=("global_step4",),
        files={},
        metric_key=None,
        metric_value=None,
        state=RunState(
            step=4,
            engines={"": StateLayout(world_size=world_size, zero_stage=2, param_dtype=param_dtype)},
            identity=IDENTITY | changes,
        ),
    )


def complaints(checkpoint: Checkpoint) -> str:
    place: Any = OneOfMany(0, 1, stage=2)
    try:
        checkpoint.check_continued_by(
            RunState(step=0, engines={"": layout_of(place, "adam")}, identity=IDENTITY),
            layout="number of processes, --ds.zero_stage and --ds.param_dtype",
        )
    except CheckpointError as error:
        return str(error)
    return ""


def test_checkpoint_from_the_same_run_can_be_resumed() -> None:
    assert complaints(checkpoint_of()) == ""


def test_identity_entries_missing_from_a_checkpoint_are_not_compared() -> None:
    older = checkpoint_of()
    assert (
        complaints(replace(older, state=replace(older.state, identity={"task": "sft", "gone": 1})))
        == ""
    )


@pytest.mark.parametrize(("then", "now"), [(100, 200), (200, 100), (100, 100), (0, 100)])
def test_changed_number_of_optimizer_steps_prints_a_notice_with_both_numbers(
    capsys: pytest.CaptureFixture[str], then: int, now: int
) -> None:
    older = checkpoint_of()
    checkpoint = replace(older, state=replace(older.state, planned_updates=then))
    run = RunState(step=0, engines=checkpoint.state.engines, identity=IDENTITY, planned_updates=now)
    checkpoint.check_continued_by(run, layout="layout")
    printed = capsys.readouterr().err
    assert ("--train.max_epochs" in printed) == (then not in (0, now))
    assert not printed or (str(then) in printed and str(now) in printed)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"world_size": 2}, ["2 process(es)", "1 process(es)", "number of processes"]),
        ({"param_dtype": "fp32"}, ["stage 2 in fp32", "stage 2 in bf16", "--ds.param_dtype"]),
        ({"--train.batch_size": 8}, ["--train.batch_size: was 8, now 4"]),
        (
            {"rows of --data.dataset": "13, 770f"},
            ["rows of --data.dataset: was 13, 770f, now 13, 5ac3"],
        ),
        (
            {"--train.seed": 7, "task": "rm"},
            ["--train.seed: was 7, now 42", "task: was rm, now sft"],
        ),
    ],
)
def test_error_for_a_checkpoint_from_a_different_run_states_both_values(
    changes: dict[str, Any], words: list[str]
) -> None:
    message = complaints(checkpoint_of(**changes))
    assert all(word in message for word in [*words, "global_step4 in --ckpt.path"]), message


def test_error_for_a_checkpoint_from_a_different_run_lists_all_differences() -> None:
    message = complaints(checkpoint_of(world_size=2, task="rm"))
    assert "number of processes" in message and "task: was rm" in message
