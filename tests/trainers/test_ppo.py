"""Tests for the RL training loop: which samples it keeps, what it logs, and how a run ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from openrlhf import termination
from openrlhf.algorithms.kl import KLController
from openrlhf.checkpoints.manager import HOW_TO_SAVE, NOTHING_SAVED, RESUME_HINT, SAVE_FAILED
from openrlhf.checkpoints.manifest import CheckpointError, RunState
from openrlhf.config.algorithm import AlgoConfig, KLConfig
from openrlhf.config.learning import CriticConfig, RLEvalConfig, RLFlags, RLTrainConfig
from openrlhf.config.rollout import RewardConfig, RolloutConfig
from openrlhf.config.shared import CheckpointConfig
from openrlhf.core.batches import Experience
from openrlhf.core.trajectory import Exclusion, Failure, StopReason, Trajectory
from openrlhf.observability.metrics import Mean, Metric, values
from openrlhf.rewards.budget import ErrorBudget, RewardErrors
from openrlhf.rollout.background import RolloutError
from openrlhf.rollout.engine import EngineError
from openrlhf.rollout.episode_metrics import rollout_metrics
from openrlhf.trainers.experience_maker import StepBatch, find_exclusions
from openrlhf.trainers.filtering import DynamicFilter, thrown_away
from openrlhf.trainers.outcome import NothingLearned
from openrlhf.trainers.ppo import PPOTrainer
from tests.trainers.episodes import episode, failed

FAILED = Exclusion.FAILED

# ---- rollout metrics


def test_rollout_metrics_match_hand_computed_values() -> None:
    kept = [
        episode(0, 0, score=1.0, actions=2),
        episode(0, 1, score=0.0, actions=4, stop=StopReason.LENGTH),
        episode(1, 0, score=2.0, actions=3),
    ]
    assert values(rollout_metrics([*kept, failed(1, 1)], [None] * 3 + [FAILED])) == pytest.approx(
        {
            "rollout/reward_mean": 1.0,
            "rollout/reward_std": 1.0,
            "rollout/response_length_mean": 3.0,
            "rollout/truncated_rate": 1 / 3,
            "rollout/num_samples": 3.0,
            "train/score": 1.0,
            "train/failed_episodes": 1.0,
        }
    )


def test_failures_are_counted_by_type_even_in_kept_episodes() -> None:
    late, kept = (
        replace(failed(0, 0), failure=Failure.TIMEOUT),
        replace(episode(0, 1, score=0.0), failure=Failure.EXIT),
    )
    episodes = [late, late, kept, episode(0, 2, score=1.0)]
    metrics = values(rollout_metrics(episodes, [FAILED, FAILED, None, Exclusion.ALONE]))
    counted = {name: value for name, value in metrics.items() if name.startswith("train/failed")}
    assert counted == {
        "train/failed_episodes": 2.0,
        "train/failed_timeout": 2.0,
        "train/failed_exit": 1.0,
    }


def test_user_metrics_are_averaged_over_the_samples_that_report_them() -> None:
    kept = [
        episode(0, 0, score=0.0, extra_logs={"format": 1.0}),
        episode(0, 1, score=0.0, extra_logs={"format": 0.0, "accuracy": 0.25}),
        episode(0, 2, score=0.0),
    ]
    metrics = values(rollout_metrics(kept, [None] * len(kept)))
    assert (metrics["train/format"], metrics["train/accuracy"]) == (0.5, 0.25)


def test_only_counts_are_logged_if_all_episodes_failed() -> None:
    metrics = values(rollout_metrics([failed(0, 0), failed(0, 1)], [FAILED] * 2))
    assert metrics == {
        "rollout/reward_std": 0.0,
        "rollout/num_samples": 0.0,
        "train/failed_episodes": 2.0,
    }


def test_user_metrics_do_not_overwrite_built_in_metrics() -> None:
    kept = [
        episode(
            score=1.0, extra_logs={"kl": 5.0, "actor_lr": 2.0, "format": 0.5, "reward_rule": 1.0}
        )
    ]
    metrics = values(rollout_metrics(kept, [None] * len(kept)))
    assert "train/kl" not in metrics and "train/actor_lr" not in metrics
    own = {
        "train/user_kl": 5.0,
        "train/user_actor_lr": 2.0,
        "train/format": 0.5,
        "train/reward_rule": 1.0,
    }
    assert own.items() <= metrics.items()


@pytest.mark.parametrize("broken", range(5))
@pytest.mark.parametrize("needs_groups", [False, True])
def test_every_sampled_episode_is_counted_in_exactly_one_metric(
    broken: int, needs_groups: bool
) -> None:
    """The batch has four samples of a group, a filtered group, and episodes without actions."""
    group = [failed(0, n) if n < broken else episode(0, n, score=1.0) for n in range(4)]
    episodes = [*group, *FILTERED, *[episode(2, n, score=1.0, actions=0) for n in range(2)]]
    exclusions = find_exclusions(episodes, needs_groups=needs_groups)
    metrics = values(rollout_metrics(episodes, exclusions))
    counted = [
        metrics[name]
        for name in ("rollout/num_samples", "train/failed_episodes", "train/left_out_episodes")
    ]
    assert sum(counted) + len(FILTERED) == len(episodes)
    assert counted[2] == 2 + (needs_groups and broken == 3)


# ---- the end of a run


class Steps:
    """A source of predefined steps that has drawn its last prompt when it yields the last step."""

    dynamic_filter = DynamicFilter(low=0.0, high=1.0)
    errors = ErrorBudget(RewardConfig(on_error="drop"))
    epoch, consumed, total_steps = 0, 0, 4

    def __init__(
        self, steps: list[list[Trajectory]], ends: tuple[BaseException, int] | None
    ) -> None:
        self.steps, self.ends = steps, ends
        self.exhausted, self.step = False, 0

    def metrics(self) -> dict[str, Metric]:
        return {}

    def publishing(self, version: int) -> AbstractContextManager[bool]:
        return nullcontext(True)

    def resume(self, *, step: int, consumed: int, folder: Path) -> None:
        self.step = step

    def __iter__(self) -> Iterator[list[Trajectory]]:
        for number, step in enumerate(self.steps, 1):
            self.exhausted = number == len(self.steps)
            self.step += not all(t.filtered for t in step)
            yield step
        if self.ends:
            error, self.step = self.ends
            raise error


class Notes:
    """A recorder and display that list events in order."""

    def __init__(self) -> None:
        self.display, self.events = self, []

    def begin(self, total_steps: int, done: int = 0) -> None: ...
    def status(self, text: str) -> None: ...
    def samples(self, step: int, trajectories: list[Trajectory]) -> None: ...

    def step(self, step: int, numbers: dict[str, float]) -> None:
        self.events.append(f"step {step}, {numbers['train/dynamic_filtering_pass_rate']:g}%")

    def evaluation(
        self, step: int, numbers: dict[str, float], trajectories: list[Trajectory]
    ) -> None:
        self.events.append(f"evaluation {step}")

    def note(self, text: str) -> None:
        self.events.append(text.partition(" --algo.dynamic_filtering_range")[0])


class Nothing:
    """An experience maker that adds no columns, and a publisher that only records versions."""

    def __init__(self) -> None:
        self.version = 0
        self.published: list[int] = []
        self.kl = KLController(0.0)

    def publish(self, version: int) -> None:
        self.version = version
        self.published.append(version)

    def annotate(self, trajectories: list[Trajectory]) -> StepBatch:
        exclusions = find_exclusions(trajectories, needs_groups=True)
        pairs = zip(trajectories, exclusions, strict=True)
        experience = Experience.from_trajectories([each for each, why in pairs if why is None])
        return StepBatch(
            experience=experience, trajectories=trajectories, exclusions=exclusions, timing={}
        )

    def credit(self, experience: Experience) -> tuple[Experience, dict[str, Metric]]:
        return experience, {}


def events(
    steps: list[list[Trajectory]],
    *,
    eval_steps: int = -1,
    freezing_steps: int = 0,
    weights: Nothing | None = None,
    manager: Any = None,
    ends: tuple[BaseException, int] | None = None,
) -> list[str]:
    """Return the events of a run over these steps.

    `ends` is an error to raise, and the number of steps to yield before raising the error.
    """
    notes = Notes()
    save_steps = -1
    if ends:
        save_steps = 9
    if manager:
        save_steps = 1
    made = trainer(
        steps,
        notes,
        eval_steps=eval_steps,
        save_steps=save_steps,
        freezing_steps=freezing_steps,
        manager=manager,
        ends=ends,
    )
    made.weights = made.maker = weights or Nothing()
    with pytest.raises(type(ends[0])) if ends else nullcontext():
        made.fit()
    return notes.events


def trainer(
    steps: list[list[Trajectory]],
    notes: Notes,
    *,
    eval_steps: int,
    save_steps: int = -1,
    freezing_steps: int = 0,
    manager: Any = None,
    ends: tuple[BaseException, int] | None = None,
    disable_ds: bool = False,
    stop_run: float | None = None,
    kls: Sequence[float] = (),
) -> Any:
    """Return a training loop that has these steps but no models. `notes` records saves and exports.

    With --ckpt.save_steps 1, the loop writes real checkpoints. `kls` are the steps' KLs.
    """
    nothing: Any = Nothing()
    recorder: Any = notes
    source: Any = Steps(steps, ends)
    policy: Any = SimpleNamespace(broadcast=lambda *_: [])
    tokenizer: Any = None
    config = RLFlags(
        train=RLTrainConfig(batch_size=2), rollout=RolloutConfig(batch_size=2),
        eval=RLEvalConfig(steps=eval_steps),
        ckpt=CheckpointConfig(
            best_metric_key="none", save_steps=save_steps, disable_ds=disable_ds
        ),
        critic=CriticConfig(freezing_steps=freezing_steps),
        algo=AlgoConfig(kl=KLConfig(stop_run=stop_run)),
    )  # fmt: skip
    made: Any = PPOTrainer(
        source,
        nothing,
        nothing,
        policy=policy,
        critic=None,
        play=lambda step: [],
        pretraining=None,
        manager=manager,
        tokenizer=tokenizer,
        recorder=recorder,
        hosts=[],
        config=config,
        start=RunState(step=0),
    )

    def save(step: int, *, best: bool = False) -> None:
        notes.note(f"save {step}")
        made.checkpointing.saved = step

    if save_steps != 1:
        made.checkpointing.save = save

    def improve(experience: Experience, *, step: int, **_: object) -> dict[str, Metric]:
        if step >= config.frozen_steps:
            made.weights.version = step + 1
        if not kls:
            return {}
        return {"train/kl": Mean(kls[step], 1)}

    made.models = SimpleNamespace(improve=improve)
    made.checkpointing.export = lambda: notes.note("export")
    return made


def terminated(*_: Any) -> Any:
    raise SystemExit(143)


def resume(made: Any, state: RunState) -> None:
    """Resume from a checkpoint that contains only `state`."""
    made.resume(SimpleNamespace(state=state, engine_dir=lambda part: "", tag="global_step2"))


class Full:
    """A checkpoint folder on a full disk."""

    def save_linked(self, step: int) -> None:
        """Return None: no step was saved as the best."""

    def begin(self, step: int, **_: object) -> None:
        raise CheckpointError("no room")


def test_failed_checkpoint_write_is_reported_and_the_run_continues() -> None:
    told = [f"The run continues without a checkpoint for step {step}: no room" for step in (1, 2)]
    end = ["No prompts are left to train on after step 2.", "export"]
    assert events([KEPT, KEPT], manager=Full()) == [
        "step 1, 100%",
        told[0],
        "step 2, 100%",
        told[1],
        *end,
    ]


@pytest.mark.parametrize(
    "error",
    [
        SystemExit(143),
        RolloutError("no engine is left"),
        EngineError("engine 0, generate: a bug of vLLM"),
    ],
)
def test_run_that_is_terminated_or_whose_engines_fail_saves_its_last_step(
    error: BaseException,
) -> None:
    assert events([KEPT, KEPT], ends=(error, 2)) == [
        "step 1, 100%",
        "step 2, 100%",
        "save 2",
        RESUME_HINT.format(2),
    ]


@pytest.mark.parametrize("last", ["evaluation", "export"])
def test_run_terminated_after_its_last_step_saves_that_step(last: str) -> None:
    notes = Notes()
    made = trainer(
        [KEPT, KEPT, FILTERED], notes, eval_steps=10 if last == "evaluation" else -1, save_steps=9
    )
    if last == "evaluation":
        made.evaluation.play = terminated
    else:
        made.checkpointing.export = terminated
    made.source.total_steps = 2
    with pytest.raises(SystemExit):
        made.fit()
    assert notes.events == ["step 1, 100%", "step 2, 100%", "save 2", RESUME_HINT.format(2)]


def test_resumed_run_terminated_before_its_first_step_does_not_save_the_same_step_again() -> None:
    notes = Notes()
    made = trainer([], notes, eval_steps=-1, save_steps=9, ends=(SystemExit(143), 2))
    resume(made, RunState(step=2))
    with pytest.raises(SystemExit):
        made.fit()
    assert notes.events == [RESUME_HINT.format(2)]


def test_resumed_run_catches_up_on_the_missing_last_evaluation() -> None:
    """The run had drawn all prompts when it was terminated before its last planned step."""
    for evaluated_at, made_up in ((1, ["evaluation 2"]), (2, [])):
        notes = Notes()
        made = trainer([], notes, eval_steps=1)
        made.source.exhausted = True
        resume(made, RunState(step=2, evaluated_at=evaluated_at))
        made.fit()
        assert notes.events == [*made_up, "No prompts are left to train on after step 2.", "export"]


def test_run_that_exceeds_its_kl_limit_ends_and_still_ends_after_it_is_resumed() -> None:
    """A run may be killed between its last checkpoint and its export."""
    notes = Notes()
    made = trainer([KEPT, KEPT, KEPT], notes, eval_steps=-1, stop_run=0.5, kls=[0.25, 1.0])
    made.fit()
    assert made.weights.published == [0, 1]  # nothing is sampled from the weights of step 2
    stop = "The run ends after step 2: the KL to the reference is 1 nats per token"
    assert notes.events[:2] == ["step 1, 100%", "step 2, 100%"]
    assert notes.events[2].startswith(stop) and notes.events[3] == "export"
    for limit, is_ended in ((0.5, True), (2.0, False)):
        notes = Notes()
        again = trainer([KEPT], notes, eval_steps=-1, stop_run=limit)
        resume(again, RunState(step=2, kl_coef=0.0, kl=made.maker.kl.last))
        again.fit()
        assert notes.events[0].startswith(stop) == is_ended
        assert ("step 3, 100%" in notes.events) == (not is_ended)
        assert notes.events[-1] == "export"
        assert again.weights.published == ([] if is_ended else [2])


def test_weights_of_a_run_stopped_by_its_kl_are_published_for_the_last_evaluation() -> None:
    made = trainer([KEPT, KEPT, KEPT], Notes(), eval_steps=9, stop_run=0.5, kls=[0.25, 1.0])
    made.fit()
    assert made.weights.published == [0, 1, 2]


def test_terminated_run_without_checkpoints_names_the_flag_that_enables_them() -> None:
    notes = Notes()
    made = trainer([KEPT], notes, eval_steps=1)
    made.evaluation.play = terminated
    with pytest.raises(SystemExit):
        made.fit()
    assert notes.events == ["step 1, 100%", NOTHING_SAVED + HOW_TO_SAVE]


@pytest.mark.parametrize(("save_steps", "disable_ds"), [(-1, False), (9, True)])
def test_run_that_writes_no_checkpoints_completes_its_export_before_it_is_terminated(
    save_steps: int, disable_ds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = Notes()
    made = trainer([KEPT], notes, eval_steps=-1, save_steps=save_steps, disable_ds=disable_ds)

    def broadcast(*_: object) -> list[Any]:
        monkeypatch.setattr("openrlhf.termination._State.status", 143)
        with termination.deferred():
            return []  # raises SystemExit unless the export delays termination

    del made.checkpointing.export  # a stub
    made.checkpointing.policy = SimpleNamespace(broadcast=broadcast)
    with pytest.raises(SystemExit):
        made.fit()
    model = Path(made.config.ckpt.output_dir).absolute()
    end = ["No prompts are left to train on after step 1.", f"model: {model}"]
    assert notes.events == ["step 1, 100%", *end]


def test_nothing_is_saved_between_yielding_a_batch_and_training_on_it() -> None:
    """A checkpoint would lose a batch that has left the source but has not been trained on."""
    assert events([KEPT, KEPT], ends=(SystemExit(143), 3)) == [
        "step 1, 100%",
        "step 2, 100%",
        NOTHING_SAVED,
    ]


KEPT = [episode(0, 0, score=1.0), episode(0, 1, score=0.0)]
FILTERED = [thrown_away(episode(1, sample, score=1.0)) for sample in range(2)]


def test_last_evaluation_runs_even_if_filtering_ends_the_run_early() -> None:
    end = ["evaluation 2", "No prompts are left to train on after step 2.", "export"]
    assert events([KEPT + FILTERED, KEPT], eval_steps=10) == ["step 1, 50%", "step 2, 100%", *end]


def test_last_evaluation_runs_even_if_the_end_of_the_epoch_is_rejected() -> None:
    end = ["evaluation 2", "No prompts are left to train on after step 2.", "export"]
    assert events([KEPT, FILTERED, KEPT, FILTERED], eval_steps=10) == [
        "step 1, 100%",
        "step 2, 100%",
        *end,
    ]


ALONE = [episode(0, 0, score=1.0), failed(0, 1)]


@pytest.mark.parametrize("steps", [[ALONE], [FILTERED], [ALONE, FILTERED, ALONE]])
def test_run_without_an_optimizer_step_raises_an_error_and_exports_nothing(
    steps: list[list[Trajectory]],
) -> None:
    notes = Notes()
    made = trainer(steps, notes, eval_steps=-1)
    with pytest.raises(NothingLearned) as raised:
        made.fit()
    assert "export" not in notes.events
    assert ("it broke" in str(raised.value)) == (ALONE in steps)
    assert ("--algo.dynamic_filtering_range 0 1" in str(raised.value)) == (FILTERED in steps)


def test_episodes_without_sampled_tokens_are_not_reported_as_single_samples() -> None:
    empty = [episode(0, 0, score=1.0, actions=0), episode(0, 1, score=0.0, actions=0)]
    with pytest.raises(NothingLearned) as raised:
        trainer([empty], Notes(), eval_steps=-1).fit()
    assert "2 have no sampled tokens" in str(raised.value)
    assert "no other finished sample" not in str(raised.value)


def test_batch_of_masked_truncated_samples_makes_no_update() -> None:
    class Masking(Nothing):
        def credit(self, experience: Experience) -> tuple[Experience, dict[str, Metric]]:
            return experience.select([]), {}

    notes = Notes()
    made = trainer(
        [[replace(each, stop_reason=StopReason.LENGTH) for each in KEPT]], notes, eval_steps=-1
    )
    made.maker = made.weights = Masking()
    with pytest.raises(NothingLearned) as raised:
        made.fit()
    assert "2 were truncated (--algo.loss.mask_truncated)" in str(raised.value)
    assert notes.events == ["step 1, 100%", "No prompts are left to train on after step 1."]
    assert made.weights.published == [0]


def test_resumed_run_without_an_optimizer_step_exports_the_restored_model() -> None:
    notes = Notes()
    made = trainer([FILTERED], notes, eval_steps=-1)
    resume(made, RunState(step=2))
    made.fit()
    assert notes.events[-1] == "export"


def test_time_spent_on_a_failed_save_is_counted() -> None:
    notes = Notes()
    made = trainer([KEPT], notes, eval_steps=-1, save_steps=1, manager=Full())
    made.checkpointing.save(1)
    assert notes.events == [SAVE_FAILED.format(1, "no room")]
    assert list(made.clock.take_all()) == ["checkpoint"]


# ---- evaluations that fail or are interrupted


@pytest.mark.parametrize(("metric", "is_due"), [("reward", False), ("other", True)])
def test_resumed_run_evaluates_its_initial_model_again_only_for_another_metric(
    metric: str, is_due: bool
) -> None:
    """--eval.patience compares later evaluations with the initial evaluation."""
    evaluation = trainer([KEPT], Notes(), eval_steps=1).evaluation
    evaluation.config = RLFlags(eval=RLEvalConfig(steps=1, at_start=True))
    evaluation.best.key = metric
    evaluation.best.restore(
        RunState(
            step=0,
            evaluated_at=0,
            best_step=0,
            best_metric_key="reward",
            best_metric_value=0.5,
        )
    )
    assert evaluation.is_due_at_start(0, last=False) == is_due


@pytest.mark.parametrize(("broken", "is_ended"), [(0, False), (1, False), (2, True), (10, True)])
def test_evaluation_with_too_many_failures_ends_the_run_and_is_never_the_best(
    broken: int, is_ended: bool
) -> None:
    def evaluate(step: int) -> list[Trajectory]:
        return [failed(n) if n < broken else episode(n, score=1.0) for n in range(10)]

    notes = Notes()
    made = trainer([KEPT], notes, eval_steps=1, save_steps=9)
    made.evaluation.play = evaluate
    made.evaluation.errors = ErrorBudget(RewardConfig(max_error_rate=0.1))
    made.evaluation.best.key = ""
    with pytest.raises(RewardErrors) if is_ended else nullcontext():
        made.fit()
    assert notes.events[:2] == ["step 1, 100%", "evaluation 1"]
    assert "save 1" in notes.events  # saved as the best, or before the error is raised
    assert ("export" in notes.events) == (not is_ended)
    assert made.evaluation.best.step == (None if is_ended else 1)


def test_run_without_checkpoints_exports_its_model_if_an_evaluation_ends_it() -> None:
    notes = Notes()
    made = trainer([KEPT], notes, eval_steps=1)
    made.evaluation.play = lambda step: [failed(step)]
    made.evaluation.errors = ErrorBudget(RewardConfig())
    with pytest.raises(RewardErrors):
        made.fit()
    assert notes.events[1:] == ["evaluation 1", "export"]


def test_interrupted_evaluation_saves_a_checkpoint_and_runs_after_resume() -> None:
    notes = Notes()
    made = trainer([KEPT, KEPT, KEPT], notes, eval_steps=2, save_steps=9)
    made.evaluation.play = terminated
    with pytest.raises(SystemExit):
        made.fit()
    assert notes.events == ["step 1, 100%", "step 2, 100%", "save 2", RESUME_HINT.format(2)]
    again = trainer([KEPT], notes, eval_steps=2)
    resume(again, RunState(step=2))
    again.fit()
    assert notes.events[4:7] == ["evaluation 2", "step 3, 100%", "evaluation 3"]


def test_weights_that_were_already_evaluated_are_not_evaluated_again() -> None:
    end = ["No prompts are left to train on after step 1.", "export"]
    assert events([KEPT, FILTERED], eval_steps=1) == ["step 1, 100%", "evaluation 1", *end]
    assert "evaluation" not in "".join(events([KEPT, FILTERED], eval_steps=-1))


@pytest.mark.parametrize(
    ("freezing_steps", "published"), [(0, [0, 1, 2, 3]), (2, [0, 3]), (-1, [0, 1, 2, 3])]
)
def test_weights_are_published_only_if_the_policy_has_changed(
    freezing_steps: int, published: list[int]
) -> None:
    weights = Nothing()
    events([KEPT] * 4, freezing_steps=freezing_steps, weights=weights)
    assert weights.published == published


@pytest.mark.parametrize(
    ("eval_steps", "has_prompts", "published"),
    [(-1, True, [0, 1]), (9, True, [0, 1, 2]), (9, False, [0, 1])],
)
def test_weights_of_the_last_step_are_published_only_for_an_evaluation(
    eval_steps: int, has_prompts: bool, published: list[int]
) -> None:
    made = trainer([KEPT, KEPT], Notes(), eval_steps=eval_steps)
    made.weights = made.maker = Nothing()
    if not has_prompts:
        made.evaluation.play = None
    made.fit()
    assert made.weights.published == published
