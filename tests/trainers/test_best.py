"""The choice of a run's best evaluation, and the end of the wait for a better one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from openrlhf.checkpoints.manager import CheckpointManager
from openrlhf.checkpoints.manifest import RunState
from openrlhf.trainers.best import BestMetric
from tests.checkpoints.kept import checkpoints_in


def rl(key: str = "", *, patience: int | None = None) -> BestMetric:
    return BestMetric(key, ending="_pass1", patience=patience)


def offline(key: str = "", *, patience: int | None = None) -> BestMetric:
    return BestMetric(key, ending="loss", patience=patience)


def improved(
    best: BestMetric, name: str, numbers: Sequence[float], *, after: int = 0
) -> list[bool]:
    """Return whether each evaluation is an improvement; the first one is of step `after` + 1."""
    return [
        best.improves(after + i, {f"eval/{name}": number})
        for i, number in enumerate(numbers, start=1)
    ]


# ---- which metric


def test_in_rl_the_first_pass_at_one_by_name_is_followed() -> None:
    best = rl()
    assert best.improves(
        1, {"eval/eval_b_pass1": 0.9, "eval/eval_a_pass4": 0.8, "eval/eval_a_pass1": 0.1}
    )
    assert (best.key, best.value, best.step) == ("eval_a_pass1", 0.1, 1)


@pytest.mark.parametrize(
    ("metrics", "followed"),
    [
        ({"eval/eval gpt_loss": 2.0}, "eval gpt_loss"),
        ({"eval/eval_loss": 0.5, "eval/acc_mean": 0.7, "eval/reward_mean": 0.0}, "eval_loss"),
    ],
)
def test_offline_the_first_loss_is_followed(metrics: dict[str, float], followed: str) -> None:
    best = offline()
    best.improves(1, metrics)
    assert best.followed == followed


@pytest.mark.parametrize("key", ["acc_mean", "eval/acc_mean"])
def test_a_metric_may_be_named_as_in_the_log_or_without_its_stage(key: str) -> None:
    assert offline(key).improves(1, {"eval/eval_loss": 0.5, "eval/acc_mean": 0.7})


def test_none_keeps_no_best_and_leaves_nothing_in_a_checkpoint() -> None:
    best = offline("none")
    assert not best.improves(1, {"eval/eval_loss": 1.0})
    assert best.state()["best_metric_key"] is None


def test_an_evaluation_without_the_metric_counts_for_nothing_and_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for best, wanted in (
        (rl("eval_a_pass1", patience=1), "eval_a_pass1"),
        (rl(patience=1), "*_pass1"),
    ):
        assert not best.improves(1, {"eval/eval_num_samples": 4.0})
        said = f"--ckpt.best_metric_key {wanted} is no metric of the evaluation: eval_num_samples."
        assert said in capsys.readouterr().err
        assert not best.exhausted


# ---- which value


def test_only_a_strictly_higher_score_is_better() -> None:
    best = rl()
    assert improved(best, "eval_a_pass1", [0.5, 0.5, 0.4, 0.6]) == [True, False, False, True]
    assert (best.value, best.step) == (0.6, 4)


@pytest.mark.parametrize(
    "name", ["eval_loss", "eval gpt_loss", "eval_truncated_rate", "eval_failed_episodes"]
)
def test_of_losses_truncation_and_failures_less_is_better(name: str) -> None:
    best = offline(name)
    assert improved(best, name, [0.5, 0.5, 0.6, 0.4]) == [True, False, False, True]
    assert (best.value, best.step) == (0.4, 4)


def test_a_value_that_is_not_finite_is_no_best_and_does_not_block_later_ones() -> None:
    assert improved(rl(), "eval_a_pass1", [math.nan, 0.1, math.nan, math.inf, 0.2]) == [
        False,
        True,
        False,
        False,
        True,
    ]
    assert improved(offline(), "eval_loss", [-math.inf, 1.0, math.nan, 0.5]) == [
        False,
        True,
        False,
        True,
    ]


def test_a_step_has_the_value_that_its_weights_were_measured_to_have() -> None:
    best = rl()
    improved(best, "eval_a_pass1", [0.5, 0.3])
    assert (best.value_of(1), best.value_of(2), best.value_of(3)) == (None, 0.3, None)


# ---- the patience


def test_the_patience_is_used_up_by_as_many_evaluations_in_a_row_that_were_not_better() -> None:
    best, waits = offline(patience=2), []
    for step, loss in enumerate([3.0, 3.5, 2.0, 2.0, math.nan, 1.0], start=1):
        best.improves(step, {"eval/eval_loss": loss})
        waits.append((best.waited, best.exhausted))
    assert waits == [(0, False), (1, False), (0, False), (1, False), (2, True), (0, False)]


def test_without_a_patience_there_is_no_end() -> None:
    best = offline()
    improved(best, "eval_loss", [1.0] * 100)
    assert not best.exhausted


# ---- a resumed run


def resumed(best: BestMetric, into: BestMetric) -> BestMetric:
    into.restore(RunState(step=9, **best.state()))
    return into


def test_a_resumed_run_has_to_beat_the_best_of_the_run_before_and_goes_on_counting() -> None:
    best = offline(patience=3)
    improved(best, "eval_loss", [2.0, 1.0, 1.5])
    best = resumed(best, offline(patience=3))
    assert (best.followed, best.value, best.step, best.waited) == ("eval_loss", 1.0, 2, 1)
    assert improved(best, "eval_loss", [1.2, 1.1], after=3) == [False, False]
    assert best.exhausted


def test_a_best_of_another_metric_is_not_continued() -> None:
    best = rl("eval_a_pass1")
    improved(best, "eval_a_pass1", [0.5])
    assert improved(resumed(best, rl("eval_b_pass1")), "eval_b_pass1", [0.1]) == [True]


def test_a_run_that_followed_nothing_can_be_resumed_with_a_patience() -> None:
    assert improved(resumed(offline("none"), offline(patience=1)), "eval_loss", [1.0]) == [True]


# ---- what is exported


def kept(folder: Path, step: int) -> CheckpointManager:
    """Return checkpoints whose best one is of step `step`."""
    checkpoints = checkpoints_in(folder)
    staged = checkpoints.begin(step, best=True)
    (Path(staged.engine_dir()) / staged.tag / "weights").write_text("w")
    checkpoints.commit(staged, state=RunState(step=step))
    return checkpoints


def exported(
    folder: Path, losses: Sequence[float], *, patience: int | None
) -> tuple[str | None, str]:
    """Return the tag of the checkpoint to export after these evaluations, if any, and the messages.

    The checkpoint of step 2 is kept.
    """
    said: list[str] = []
    best = offline(patience=patience)
    improved(best, "eval_loss", losses)
    found = best.to_export(len(losses), kept(folder, 2), said.append)
    return found.tag if found else None, " ".join(said)


def test_the_best_weights_are_and_the_reason_is_said(tmp_path: Path) -> None:
    assert exported(tmp_path, [2.0, 1.0, 1.5, 1.25], patience=2) == (
        "best_global_step2",
        "--eval.patience 2 ends the run after step 4. "
        "The export has the weights of step 2, with the best eval_loss of all evaluations, 1.",
    )


def test_they_are_too_where_the_run_ended_before_its_patience(tmp_path: Path) -> None:
    tag, said = exported(tmp_path, [2.0, 1.0, 1.5], patience=2)
    assert tag == "best_global_step2" and said.startswith("The export has the weights of step 2")


def test_nothing_is_loaded_where_the_last_weights_are_the_best(tmp_path: Path) -> None:
    tag, said = exported(tmp_path, [2.0, 1.0], patience=2)
    assert tag is None and said.startswith("The export has the weights of step 2")


def test_without_a_patience_the_last_weights_are_exported_as_ever(tmp_path: Path) -> None:
    assert exported(tmp_path, [2.0, 1.0, 1.5], patience=None) == (None, "")


def test_the_last_weights_are_exported_where_there_is_no_best_or_its_checkpoint_is_gone(
    tmp_path: Path,
) -> None:
    tag, said = exported(tmp_path, [math.nan, math.nan], patience=2)
    assert tag is None and said.endswith(
        "The export has the last weights: no evaluation had a value of eval_loss."
    )
    tag, said = exported(tmp_path, [1.0, 2.0, 3.0], patience=2)
    assert (
        tag is None
        and "no complete checkpoint of the weights of step 1" in said
        and str(tmp_path) in said
    )
