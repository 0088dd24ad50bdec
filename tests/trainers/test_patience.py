"""Tests for --eval.patience in both training loops: when a run ends and which weights it exports.

A resumed run ends at the same step as an uninterrupted run. The model is a single number: the step
that produced the model. Evaluation results are predefined.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from openrlhf import termination
from openrlhf.algorithms.kl import KLController
from openrlhf.checkpoints.manager import CheckpointManager
from openrlhf.checkpoints.manifest import RunState
from openrlhf.config.learning import RLEvalConfig, RLFlags, RLTrainConfig
from openrlhf.config.rollout import RewardConfig
from openrlhf.config.shared import CheckpointConfig, EvalConfig, TrainConfig
from openrlhf.config.supervised import RMConfig
from openrlhf.core.batches import Experience
from openrlhf.observability.metrics import Last, Metric
from openrlhf.rewards.budget import ErrorBudget
from openrlhf.trainers import checkpointing
from openrlhf.trainers.experience_maker import StepBatch
from openrlhf.trainers.ppo import PPOTrainer
from openrlhf.trainers.supervised import SupervisedTrainer
from openrlhf.training.engine import StepResult
from openrlhf.workers.base import TrainedWorker
from tests.checkpoints.kept import checkpoints_in
from tests.tiny import character_tokenizer
from tests.trainers.episodes import episode
from tests.trainers.test_supervised import CountingTask, Numbers, OneOfMany

STEPS = 8


class Weights:
    """The trained number, which also acts as the engine and as the only worker in its group."""

    size, logs = 1, ()
    module = nn.Linear(1, 1)
    nonfinite_steps = 0
    average = None
    evaluating = averaged = staticmethod(nullcontext)

    def __init__(self) -> None:
        self.made_by = 0
        self.saves = 0  # number of written checkpoints
        self.exported: int | None = None
        self.strategy = Alone(0, 1, 2)

    def optimize(self, *_: Any, **__: Any) -> StepResult:
        self.made_by += 1
        return StepResult(applied=True, grad_norm=0.0, lr=0.0)

    def save(self, directory: str, tag: str) -> None:
        self.saves += 1
        (Path(directory) / tag / "weights").write_text(str(self.made_by))

    def load(self, directory: str, tag: str) -> None:
        self.made_by = int((Path(directory) / tag / "weights").read_text())

    def broadcast(self, method: Any, *args: Any) -> list[Any]:
        calls = {TrainedWorker.save_checkpoint: self.save, TrainedWorker.load_checkpoint: self.load}
        calls[TrainedWorker.export] = lambda *_: setattr(self, "exported", self.made_by)
        return [calls[method](*args)]


class Log:
    """A fake recorder, display and run folder; it records messages and evaluations."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.evaluated: list[int] = []
        self.display = SimpleNamespace(
            note=self.said.append, begin=lambda *_, **__: None, status=lambda _: None
        )

    def step(self, step: int, values: Mapping[str, float]) -> None: ...

    def samples(self, step: int, trajectories: Sequence[Any]) -> None: ...

    def evaluation(
        self, step: int, values: Mapping[str, float], trajectories: Sequence[Any] = ()
    ) -> None:
        self.evaluated.append(step)


class Killed(Exception):
    """The simulated death of the process."""


class Written(CountingTask):
    """A training task whose evaluations return predefined results."""

    def __init__(self, losses: Sequence[float], weights: Weights) -> None:
        super().__init__()
        self.losses, self.weights = losses, weights

    def evaluation_names(self, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        return {"eval/eval_loss": Last(self.losses[self.weights.made_by - 1])}


class Alone(OneOfMany):
    is_main = True

    def broadcast(self, value: Any) -> Any:
        return value

    def barrier(self) -> None: ...


class Supervised(SupervisedTrainer[int, Any]):
    def __init__(
        self, folder: Path, losses: Sequence[float], patience: int | None, save_steps: int = -1
    ) -> None:
        self.weights, self.log = Weights(), Log()
        task = Written(losses, self.weights)
        task.config = RMConfig(
            train=TrainConfig(batch_size=1, micro_batch_size=1),
            ckpt=CheckpointConfig(path=str(folder), save_steps=save_steps),
            eval=EvalConfig(steps=1, patience=patience),
        )
        super().__init__(
            task,
            self.weights,  # pyright: ignore[reportArgumentType]
            tokenizer=character_tokenizer(),
            train_rows=Numbers(STEPS),
            eval_rows=Numbers(1),
            checkpoints=checkpoints_in(folder),
            recorder=self.log,  # pyright: ignore[reportArgumentType]
            start=RunState(step=0, run_dir=str(folder)),
        )
        self.dies_after = STEPS + 1

    def windows(self) -> Iterator[list[Any]]:
        for window in super().windows():
            if self.step == self.dies_after:
                raise Killed
            yield window

    def export(self, path: str, *, final: bool = True) -> None:
        self.weights.exported = self.weights.made_by


class Prompts:
    """A source that yields one batch per step."""

    total_steps, epoch, dynamic_filter = STEPS, 0, None
    consumed = 0
    errors = ErrorBudget(RewardConfig(on_error="drop"))

    @property
    def exhausted(self) -> bool:
        return self.consumed == STEPS

    @property
    def step(self) -> int:
        return self.consumed

    def __iter__(self) -> Iterator[list[Any]]:
        while not self.exhausted:
            self.consumed += 1
            yield [episode(score=1.0)]

    def resume(self, *, step: int, consumed: int, folder: Path) -> None:
        self.consumed = consumed

    def save(self, folder: Path) -> None:
        pass

    def publishing(self, version: int) -> AbstractContextManager[None]:
        return nullcontext()

    def metrics(self) -> dict[str, Metric]:
        return {}


def annotated(trajectories: list[Any]) -> StepBatch:
    experience = Experience.from_trajectories(trajectories)
    return StepBatch(
        experience=experience,
        trajectories=trajectories,
        exclusions=[None] * len(trajectories),
        timing={},
    )


class OnPolicy:
    """The RL training loop, with updates that only count steps."""

    def __init__(
        self,
        folder: Path,
        scores: Sequence[float],
        patience: int | None,
        save_steps: int = -1,
        at_start: bool = False,
    ) -> None:
        self.weights_made = Weights()
        self.log = Log()
        config = RLFlags(
            train=RLTrainConfig(batch_size=1, step_timeout=1.0),
            eval=RLEvalConfig(
                steps=1, at_start=at_start, n_samples_per_prompt=1, patience=patience
            ),
            ckpt=CheckpointConfig(path=str(folder), save_steps=save_steps),
        )

        def play(step: int) -> list[Any]:
            return [episode(score=scores[self.weights_made.made_by - (not at_start)])]

        def improve(*_: Any, **__: Any) -> dict[str, Metric]:
            self.weights_made.optimize()
            return {}

        policy: Any = self.weights_made
        source: Any = Prompts()
        log: Any = self.log
        maker: Any = SimpleNamespace(
            annotate=annotated, credit=lambda e: (e, {}), kl=KLController(coef=0.0)
        )
        publisher: Any = SimpleNamespace(version=0, publish=lambda _: None)
        self.loop: Any = PPOTrainer(
            source,
            maker,
            publisher,
            policy=policy,
            critic=None,
            play=play,
            pretraining=None,
            manager=checkpoints_in(folder, parts=["_actor"], max_num=STEPS),
            tokenizer=character_tokenizer(),
            recorder=log,
            hosts=[],
            config=config,
            start=RunState(step=0, run_dir=str(folder)),
        )
        self.loop.models = SimpleNamespace(improve=improve)
        self.fit = self.loop.fit
        self.resume = self.loop.resume

    @property
    def saved(self) -> CheckpointManager:
        """Return the run's checkpoint manager."""
        return self.loop.checkpointing.manager


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make worker calls return their results directly when they are launched."""
    monkeypatch.setattr(checkpointing, "wait_for", lambda launched, **_: launched)


# ---- supervised


LOSSES = [3.0, 2.0, 2.5, 1.0, 1.5, 1.0, 1.2, 0.5]


def test_supervised_run_stops_early_and_exports_the_best_weights(
    tmp_path: Path,
) -> None:
    """The best evaluation is at step 4; the evaluations after steps 5, 6 and 7 are not better."""
    trainer = Supervised(tmp_path, LOSSES, patience=3)
    trainer.fit()
    assert trainer.log.evaluated == [1, 2, 3, 4, 5, 6, 7]
    assert trainer.weights.exported == 4
    assert trainer.log.said == [
        "--eval.patience 3 ends the run after step 7. "
        "The export contains the weights of step 4: the best eval_loss of all evaluations is 1, "
        "at step 4.",
        "model: ./ckpt",
    ]


def test_supervised_run_completes_if_its_patience_is_never_used_up(tmp_path: Path) -> None:
    trainer = Supervised(tmp_path, LOSSES, patience=4)
    trainer.fit()
    assert (trainer.log.evaluated[-1], trainer.weights.exported) == (8, 8)


def test_only_one_best_checkpoint_is_kept_and_it_stores_its_metric(tmp_path: Path) -> None:
    Supervised(tmp_path, LOSSES, patience=3).fit()
    (checkpoint,) = checkpoints_in(tmp_path).checkpoints()
    assert (checkpoint.tag, checkpoint.metric_key, checkpoint.metric_value) == (
        "best_global_step4",
        "eval_loss",
        1.0,
    )


@pytest.mark.parametrize("killed_after", [3, 4, 5, 6])
def test_resumed_supervised_run_stops_at_the_same_step_as_an_uninterrupted_one(
    tmp_path: Path, killed_after: int
) -> None:
    broken = Supervised(tmp_path, LOSSES, patience=3, save_steps=1)
    broken.dies_after = killed_after
    with pytest.raises(Killed):
        broken.fit()
    resumed = Supervised(tmp_path, LOSSES, patience=3, save_steps=1)
    checkpoint = resumed.checkpoints.latest()
    assert checkpoint and checkpoint.state.step == killed_after
    resumed.resume(checkpoint)
    resumed.fit()
    assert broken.log.evaluated + resumed.log.evaluated == [1, 2, 3, 4, 5, 6, 7]
    assert resumed.weights.exported == 4


def test_resuming_a_run_that_stopped_early_takes_no_steps(
    tmp_path: Path,
) -> None:
    Supervised(tmp_path, LOSSES, patience=3, save_steps=1).fit()
    again = Supervised(tmp_path, LOSSES, patience=3, save_steps=1)
    checkpoint = again.checkpoints.latest()
    assert checkpoint
    again.resume(checkpoint)
    again.fit()
    assert (again.log.evaluated, again.weights.exported) == ([], 4)


def test_supervised_run_terminated_in_its_last_evaluation_saves_its_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Supervised(tmp_path, LOSSES, patience=None, save_steps=100)
    monkeypatch.setattr(termination, "asked", lambda: 143 * (trainer.log.evaluated[-1:] == [STEPS]))
    with pytest.raises(SystemExit):
        trainer.fit()
    assert checkpoints_in(tmp_path).find(STEPS, best=False)
    assert trainer.weights.exported is None


def test_supervised_run_terminated_during_its_export_finishes_the_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Exporting(Supervised):
        def export(self, path: str, *, final: bool = True) -> None:
            assert termination._State.open_deferrals  # SIGTERM does not interrupt the export
            monkeypatch.setattr(termination._State, "status", 143)
            super().export(path, final=final)

    trainer = Exporting(tmp_path, LOSSES, patience=None)
    with pytest.raises(SystemExit):
        trainer.fit()
    assert trainer.weights.exported == STEPS


def test_supervised_run_writes_a_step_once_if_it_is_also_the_best(tmp_path: Path) -> None:
    """Steps 1, 2, 4 and 8 are new bests."""
    trainer = Supervised(tmp_path, LOSSES, patience=4, save_steps=1)
    trainer.fit()
    assert trainer.weights.saves == STEPS
    assert checkpoints_in(tmp_path).find(STEPS, best=False)
    assert checkpoints_in(tmp_path).find(STEPS, best=True)


# ---- RL


SCORES = [0.1, 0.3, 0.2, 0.3, 0.25, 0.9]


def test_rl_run_stops_early_and_exports_the_best_policy(tmp_path: Path) -> None:
    trainer = OnPolicy(tmp_path, SCORES, patience=3)
    trainer.fit()
    assert trainer.log.evaluated == [1, 2, 3, 4, 5]
    assert trainer.weights_made.exported == 2
    said, exported = trainer.log.said
    assert exported.startswith("model: ") and said.startswith(
        "--eval.patience 3 ends the run after step 5. The export contains the weights of step 2"
    )
    assert [checkpoint.tag for checkpoint in trainer.saved.checkpoints()] == ["best_global_step2"]


def test_initial_policy_is_exported_if_training_never_improves_it(
    tmp_path: Path,
) -> None:
    trainer = OnPolicy(tmp_path, [0.5, 0.4, 0.3, 0.2], patience=2, at_start=True)
    trainer.fit()
    assert (trainer.log.evaluated, trainer.weights_made.exported) == ([0, 1, 2], 0)


def test_resumed_rl_run_stops_at_the_same_step_as_an_uninterrupted_one(tmp_path: Path) -> None:
    """The run resumes from step 3's checkpoint, after one evaluation without improvement."""
    OnPolicy(tmp_path, SCORES, patience=3, save_steps=1).fit()
    resumed = OnPolicy(tmp_path, SCORES, patience=3, save_steps=1)
    checkpoint = resumed.saved.find(3, best=False)
    assert checkpoint and checkpoint.state.evaluations_since_best == 1
    resumed.resume(checkpoint)
    resumed.fit()
    assert (resumed.log.evaluated, resumed.weights_made.exported) == ([4, 5], 2)


def test_initial_evaluation_is_not_repeated_after_a_kill(tmp_path: Path) -> None:
    scores = [0.5, 0.4, 0.3, 0.2]
    OnPolicy(tmp_path, scores, patience=2, at_start=True).fit()
    resumed = OnPolicy(tmp_path, scores, patience=2, at_start=True)
    checkpoint = resumed.saved.latest()
    assert checkpoint and checkpoint.tag == "best_global_step0"
    resumed.resume(checkpoint)
    resumed.fit()
    assert resumed.log.evaluated == [1, 2]


@pytest.mark.parametrize(("patience", "saved"), [(3, False), (None, True)])
def test_terminating_an_export_does_not_save_the_best_weights_as_the_last_step(
    tmp_path: Path, patience: int | None, saved: bool
) -> None:
    def terminated() -> None:
        raise SystemExit(143)

    trainer = OnPolicy(tmp_path, [*SCORES, 0.1, 0.1], patience=patience, save_steps=100)
    trainer.loop.checkpointing.export = terminated
    with pytest.raises(SystemExit):
        trainer.fit()
    last = checkpoints_in(tmp_path, parts=["_actor"]).find(trainer.loop.step, best=False)
    assert bool(last) == saved and trainer.weights_made.made_by == (8 if saved else 2)


@pytest.mark.parametrize(("save_steps", "is_finished"), [(-1, True), (100, False)])
def test_rl_run_terminated_during_its_export_finishes_it_or_saves_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save_steps: int, is_finished: bool
) -> None:
    trainer = OnPolicy(tmp_path, [*SCORES, 0.1, 0.1], patience=None, save_steps=save_steps)
    trainer.loop.evaluation.best.key = "none"
    broadcast = trainer.weights_made.broadcast

    def broadcast_and_terminate(method: Any, *args: Any) -> list[Any]:
        if method is TrainedWorker.export:
            if not termination._State.open_deferrals:
                raise SystemExit(143)
            monkeypatch.setattr(termination._State, "status", 143)
        return broadcast(method, *args)

    monkeypatch.setattr(trainer.weights_made, "broadcast", broadcast_and_terminate)
    with pytest.raises(SystemExit):
        trainer.fit()
    assert (trainer.weights_made.exported == STEPS) == is_finished
    assert bool(trainer.saved.find(STEPS, best=False)) != is_finished


def test_last_policy_is_exported_without_patience(tmp_path: Path) -> None:
    trainer = OnPolicy(tmp_path, [*SCORES, 0.1, 0.1], patience=None)
    trainer.fit()
    assert (trainer.log.evaluated[-1], trainer.weights_made.exported) == (STEPS, STEPS)
    assert trainer.log.said == [f"model: {Path('ckpt').absolute()}"]


def test_rl_run_writes_a_step_once_if_it_is_also_the_best(tmp_path: Path) -> None:
    """Steps 1, 2 and 6 are new bests."""
    trainer = OnPolicy(tmp_path, [*SCORES, 0.1, 0.1], patience=None, save_steps=1)
    trainer.fit()
    assert trainer.weights_made.saves == STEPS
    for step in range(1, STEPS + 1):
        assert trainer.saved.find(step, best=False)
    assert trainer.saved.find(6, best=True)
