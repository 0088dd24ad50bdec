"""What the loop keeps of a batch, what it measures of it, and how a run ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from openrlhf.batches import Experience
from openrlhf.checkpoints.manifest import CheckpointError, RunState
from openrlhf.config.learning import CriticConfig, RLEvalConfig, RLFlags, RLTrainConfig
from openrlhf.config.rollout import RewardConfig, RolloutConfig
from openrlhf.config.shared import CheckpointConfig
from openrlhf.observability.metrics import Metric, values
from openrlhf.rewards.budget import ErrorBudget
from openrlhf.rollout.background import RolloutError
from openrlhf.rollout.episode_metrics import rollout_metrics
from openrlhf.trainers.experience_maker import Annotated, trainable
from openrlhf.trainers.filtering import DynamicFilter, thrown_away
from openrlhf.trainers.ppo import PPOTrainer
from openrlhf.trajectory import Failure, StopReason, Trajectory
from tests.trainers.episodes import episode, failed

# ---- metrics of the rollout


def test_the_metrics_of_a_rollout_by_hand() -> None:
    kept = [
        episode(0, 0, score=1.0, actions=2),
        episode(0, 1, score=0.0, actions=4, stop=StopReason.LENGTH),
        episode(1, 0, score=2.0, actions=3),
    ]
    assert values(rollout_metrics([*kept, failed(1, 1)], kept)) == pytest.approx(
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


def test_errors_are_counted_by_kind_those_of_kept_episodes_too() -> None:
    late, kept = replace(failed(0, 0), failure=Failure.TIMEOUT), replace(episode(0, 1, score=0.0), failure=Failure.EXIT)
    metrics = values(rollout_metrics([late, late, kept, episode(0, 2, score=1.0)], [kept]))
    counted = {name: value for name, value in metrics.items() if name.startswith("train/failed")}
    assert counted == {"train/failed_episodes": 2.0, "train/failed_timeout": 2.0, "train/failed_exit": 1.0}


def test_extra_numbers_are_means_over_the_samples_that_gave_them() -> None:
    kept = [
        episode(0, 0, score=0.0, extra_logs={"format": 1.0}),
        episode(0, 1, score=0.0, extra_logs={"format": 0.0, "accuracy": 0.25}),
        episode(0, 2, score=0.0),
    ]
    metrics = values(rollout_metrics(kept, kept))
    assert (metrics["train/format"], metrics["train/accuracy"]) == (0.5, 0.25)


def test_where_everything_failed_only_counts_are_left() -> None:
    metrics = values(rollout_metrics([failed(0, 0), failed(0, 1)], []))
    assert metrics == {"rollout/reward_std": 0.0, "rollout/num_samples": 0.0, "train/failed_episodes": 2.0}


def test_numbers_beside_a_reward_do_not_mix_with_ours() -> None:
    kept = [episode(score=1.0, extra_logs={"kl": 5.0, "actor_lr": 2.0, "format": 0.5, "reward_rule": 1.0})]
    metrics = values(rollout_metrics(kept, kept))
    assert "train/kl" not in metrics and "train/actor_lr" not in metrics
    own = {"train/user_kl": 5.0, "train/user_actor_lr": 2.0, "train/format": 0.5, "train/reward_rule": 1.0}
    assert own.items() <= metrics.items()


# ---- the end of a run


class Steps:
    """A source of given steps, the last prompt of which has been drawn when the last one is handed out."""

    keep = DynamicFilter(low=0.0, high=1.0)
    errors = ErrorBudget(RewardConfig(on_error="drop"))
    epoch, consumed, total_steps = 0, 0, 4

    def __init__(self, steps: list[list[Trajectory]], ends: tuple[BaseException, int] | None) -> None:
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
    """Recorder and display: what happened, in order."""

    def __init__(self) -> None:
        self.display, self.events = self, []

    def begin(self, total_steps: int, done: int) -> None: ...
    def status(self, text: str) -> None: ...
    def samples(self, step: int, trajectories: list[Trajectory]) -> None: ...

    def step(self, step: int, numbers: dict[str, float]) -> None:
        self.events.append(f"step {step}, {numbers['train/dynamic_filtering_pass_rate']:g}%")

    def evaluation(self, step: int, numbers: dict[str, float], trajectories: list[Trajectory]) -> None:
        self.events.append(f"evaluation {step}")

    def note(self, text: str) -> None:
        self.events.append(text)


class Nothing:
    """Remembers what it publishes, and adds nothing to a batch."""

    def __init__(self) -> None:
        self.published: list[int] = []

    def publish(self, version: int) -> None:
        self.published.append(version)

    def annotate(self, trajectories: list[Trajectory]) -> Annotated:
        kept = [trajectories[i] for i in trainable(trajectories, needs_groups=True)]
        experience = Experience.from_trajectories(kept)
        return Annotated(experience=experience, trajectories=trajectories, kept=kept, timing={})

    def credit(self, experience: Experience) -> tuple[Experience, dict[str, Metric]]:
        return experience, {}


class Untrained(PPOTrainer):
    """The loop without models."""

    def improve(self, experience: Experience) -> dict[str, Metric]:
        return {}

    terminated_in_export = False

    def export_final(self, folder: Path) -> None:
        if self.terminated_in_export:
            raise SystemExit(143)
        self.recorder.display.note("export")

    def _gather(self, launched: list[Any], doing: str) -> list[Any]:
        return launched

    def save(self) -> None:
        if self.config.ckpt.save_steps == 1:
            return super().save()
        self.recorder.display.note(f"save {self.step}")


def events(
    steps: list[list[Trajectory]],
    *,
    eval_steps: int = -1,
    freezing_steps: int = 0,
    weights: Nothing | None = None,
    checkpoints: Any = None,
    ends: tuple[BaseException, int] | None = None,
) -> list[str]:
    """What a run over these steps does. `ends`: an error after them, and the steps handed out when it comes."""
    notes, save_steps = Notes(), 1 if checkpoints else 9 if ends else -1
    made = trainer(steps, notes, eval_steps=eval_steps, save_steps=save_steps, freezing_steps=freezing_steps)
    made.checkpoints, made.source = checkpoints, Steps(steps, ends)
    made.weights = made.maker = weights or Nothing()
    with pytest.raises(type(ends[0])) if ends else nullcontext():
        made.fit()
    return notes.events


def trainer(
    steps: list[list[Trajectory]], notes: Notes, *, eval_steps: int, save_steps: int = -1, freezing_steps: int = 0
) -> Any:
    """The loop without models, over these steps."""
    nothing = Nothing()
    config = RLFlags(
        train=RLTrainConfig(batch_size=2), rollout=RolloutConfig(batch_size=2), eval=RLEvalConfig(steps=eval_steps),
        ckpt=CheckpointConfig(best_metric_key="none", save_steps=save_steps), critic=CriticConfig(freezing_steps=freezing_steps),
    )  # fmt: skip
    parts: dict[str, Any] = {
        "source": Steps(steps, None), "maker": nothing, "policy": None, "critic": None, "weights": nothing,
        "evaluate": lambda step: [], "pretraining": None, "checkpoints": None,
        "tokenizer": None, "recorder": notes, "config": config, "start": None, "hosts": [],
    }  # fmt: skip
    return Untrained(**parts)


class Full:
    """A folder of checkpoints on a full disk."""

    def begin(self, step: int, **_: object) -> None:
        raise CheckpointError("no room")


def test_a_checkpoint_that_cannot_be_written_is_told_and_the_run_goes_on() -> None:
    told = [f"The run goes on without a checkpoint of step {step}: no room" for step in (1, 2)]
    end = ["Nothing is left to learn from after step 2.", "export"]
    assert events([KEPT, KEPT], checkpoints=Full()) == ["step 1, 100%", told[0], "step 2, 100%", told[1], *end]


@pytest.mark.parametrize("error", [SystemExit(143), RolloutError("no engine is left")])
def test_a_run_that_is_terminated_or_loses_its_engines_saves_its_last_step(error: BaseException) -> None:
    assert events([KEPT, KEPT], ends=(error, 2)) == ["step 1, 100%", "step 2, 100%", "save 2"]


@pytest.mark.parametrize("last", ["evaluation", "export"])
def test_a_run_that_is_terminated_after_its_last_step_saves_the_step(last: str) -> None:
    def evaluate(step: int) -> list[Trajectory]:
        raise SystemExit(143)

    notes = Notes()
    made = trainer([KEPT, KEPT, FILTERED], notes, eval_steps=10 if last == "evaluation" else -1, save_steps=9)
    made.evaluate, made.terminated_in_export = evaluate, last == "export"
    made.source.total_steps = 2
    with pytest.raises(SystemExit):
        made.fit()
    assert notes.events == ["step 1, 100%", "step 2, 100%", "save 2"]


def test_a_resumed_run_makes_the_last_evaluation_that_was_not_made() -> None:
    """Its prompts were used up when it was terminated, and its step is not the last that was planned."""
    for evaluated_at, made_up in ((1, ["evaluation 2"]), (2, [])):
        notes = Notes()
        made = trainer([], notes, eval_steps=1)
        made.source.exhausted = True
        state = RunState(step=2, evaluated_at=evaluated_at)
        made.policy = SimpleNamespace(broadcast=lambda *_: [])
        made.resume(SimpleNamespace(state=state, engine_dir=lambda part: "", tag="global_step2"))
        made.fit()
        assert notes.events == [*made_up, "Nothing is left to learn from after step 2.", "export"]


def test_nothing_is_saved_while_a_batch_is_on_its_way_to_the_loop() -> None:
    """The source has given it away, and the loop has not got it: a checkpoint would be without it."""
    assert events([KEPT, KEPT], ends=(SystemExit(143), 3)) == ["step 1, 100%", "step 2, 100%"]


KEPT = [episode(0, 0, score=1.0), episode(0, 1, score=0.0)]
FILTERED = [thrown_away(episode(1, sample, score=1.0)) for sample in range(2)]


def test_the_last_evaluation_comes_after_the_last_prompt_though_the_run_has_fewer_steps() -> None:
    end = ["evaluation 2", "Nothing is left to learn from after step 2.", "export"]
    assert events([KEPT + FILTERED, KEPT], eval_steps=10) == ["step 1, 50%", "step 2, 100%", *end]


def test_an_episode_whose_rest_is_all_filtered_makes_no_step_and_the_last_evaluation_is_made_all_the_same() -> None:
    end = ["evaluation 2", "Nothing is left to learn from after step 2.", "export"]
    assert events([KEPT, FILTERED, KEPT, FILTERED], eval_steps=10) == ["step 1, 100%", "step 2, 100%", *end]


def test_weights_that_have_been_evaluated_are_not_evaluated_again() -> None:
    end = ["Nothing is left to learn from after step 1.", "export"]
    assert events([KEPT, FILTERED], eval_steps=1) == ["step 1, 100%", "evaluation 1", *end]
    assert "evaluation" not in "".join(events([KEPT, FILTERED], eval_steps=-1))


@pytest.mark.parametrize(("freezing_steps", "published"), [(0, [0, 1, 2, 3]), (2, [0, 3]), (-1, [0, 1, 2, 3])])
def test_weights_are_published_when_the_policy_has_changed(freezing_steps: int, published: list[int]) -> None:
    weights = Nothing()
    events([KEPT] * 3, freezing_steps=freezing_steps, weights=weights)
    assert weights.published == published
