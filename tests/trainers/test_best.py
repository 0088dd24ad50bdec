"""Tests for early stopping and for choosing the best evaluation."""

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
    """Return whether each evaluation, starting at step `after` + 1, is an improvement."""
    return [
        best.improves(after + i, {f"eval/{name}": number})
        for i, number in enumerate(numbers, start=1)
    ]


# ---- which metric


def test_rl_tracks_the_alphabetically_first_pass1_metric_by_default() -> None:
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
def test_offline_runs_track_the_alphabetically_first_loss_by_default(
    metrics: dict[str, float], followed: str
) -> None:
    best = offline()
    best.improves(1, metrics)
    assert best.followed == followed


@pytest.mark.parametrize("key", ["acc_mean", "eval/acc_mean"])
def test_metric_key_works_with_and_without_its_eval_prefix(key: str) -> None:
    assert offline(key).improves(1, {"eval/eval_loss": 0.5, "eval/acc_mean": 0.7})


def test_metric_key_none_disables_tracking_and_stores_no_metric_in_checkpoints() -> None:
    best = offline("none")
    assert not best.improves(1, {"eval/eval_loss": 1.0})
    assert best.state()["best_metric_key"] is None


def test_evaluation_without_the_metric_is_ignored_with_a_notice(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for best, wanted in (
        (rl("eval_a_pass1", patience=1), "eval_a_pass1"),
        (rl(patience=1), "*_pass1"),
    ):
        assert not best.improves(1, {"eval/eval_num_samples": 4.0})
        said = capsys.readouterr().err
        assert f"--ckpt.best_metric_key {wanted} " in said and "eval_num_samples" in said
        assert not best.exhausted


# ---- which value


def test_score_is_better_only_if_strictly_higher() -> None:
    best = rl()
    assert improved(best, "eval_a_pass1", [0.5, 0.5, 0.4, 0.6]) == [True, False, False, True]
    assert (best.value, best.step) == (0.6, 4)


@pytest.mark.parametrize(
    "name", ["eval_loss", "eval gpt_loss", "eval_truncated_rate", "eval_failed_episodes"]
)
def test_losses_truncation_and_failures_are_minimized(name: str) -> None:
    best = offline(name)
    assert improved(best, name, [0.5, 0.5, 0.6, 0.4]) == [True, False, False, True]
    assert (best.value, best.step) == (0.4, 4)


def test_nonfinite_value_is_never_the_best_and_does_not_block_later_values() -> None:
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


def test_metric_value_is_known_only_for_the_last_evaluated_step() -> None:
    best = rl()
    improved(best, "eval_a_pass1", [0.5, 0.3])
    assert (best.value_of(1), best.value_of(2), best.value_of(3)) == (None, 0.3, None)


# ---- the patience


def test_patience_counts_consecutive_evaluations_without_improvement() -> None:
    best, waits = offline(patience=2), []
    for step, loss in enumerate([3.0, 3.5, 2.0, 2.0, math.nan, 1.0], start=1):
        best.improves(step, {"eval/eval_loss": loss})
        waits.append((best.waited, best.exhausted))
    assert waits == [(0, False), (1, False), (0, False), (1, False), (2, True), (0, False)]


def test_run_without_patience_never_stops_early() -> None:
    best = offline()
    improved(best, "eval_loss", [1.0] * 100)
    assert not best.exhausted


# ---- a resumed run


def resumed(best: BestMetric, into: BestMetric) -> BestMetric:
    into.restore(RunState(step=9, **best.state()))
    return into


def test_resumed_run_keeps_the_best_value_and_the_patience_count() -> None:
    best = offline(patience=3)
    improved(best, "eval_loss", [2.0, 1.0, 1.5])
    best = resumed(best, offline(patience=3))
    assert (best.followed, best.value, best.step, best.waited) == ("eval_loss", 1.0, 2, 1)
    assert improved(best, "eval_loss", [1.2, 1.1], after=3) == [False, False]
    assert best.exhausted


def test_best_value_of_a_different_metric_is_not_restored() -> None:
    best = rl("eval_a_pass1")
    improved(best, "eval_a_pass1", [0.5])
    assert improved(resumed(best, rl("eval_b_pass1")), "eval_b_pass1", [0.1]) == [True]


def test_run_without_tracked_metric_can_resume_with_patience() -> None:
    assert improved(resumed(offline("none"), offline(patience=1)), "eval_loss", [1.0]) == [True]


# ---- what is exported


def kept(folder: Path, step: int) -> CheckpointManager:
    """Return a checkpoint manager whose best checkpoint was saved at step `step`."""
    checkpoints = checkpoints_in(folder)
    staged = checkpoints.begin(step, best=True)
    (Path(staged.engine_dir()) / staged.tag / "weights").write_text("w")
    checkpoints.commit(staged, state=RunState(step=step))
    return checkpoints


def exported(
    folder: Path, losses: Sequence[float], *, patience: int | None
) -> tuple[str | None, str]:
    """Return the tag of the checkpoint to export after these evaluations, and the printed messages.

    The tag is None if the latest weights are exported. Only step 2 has a checkpoint.
    """
    said: list[str] = []
    best = offline(patience=patience)
    improved(best, "eval_loss", losses)
    found = best.to_export(len(losses), kept(folder, 2), said.append)
    return found.tag if found else None, " ".join(said)


def test_best_weights_are_exported_with_the_reason(tmp_path: Path) -> None:
    assert exported(tmp_path, [2.0, 1.0, 1.5, 1.25], patience=2) == (
        "best_global_step2",
        "--eval.patience 2 ends the run after step 4. "
        "The export contains the weights of step 2: the best eval_loss of all evaluations is 1, "
        "at step 2.",
    )


def test_best_weights_are_exported_if_the_run_ends_before_its_patience(tmp_path: Path) -> None:
    tag, said = exported(tmp_path, [2.0, 1.0, 1.5], patience=2)
    assert tag == "best_global_step2" and "weights of step 2" in said


def test_no_checkpoint_is_loaded_if_the_last_weights_are_the_best(tmp_path: Path) -> None:
    tag, said = exported(tmp_path, [2.0, 1.0], patience=2)
    assert tag is None and "weights of step 2" in said


def test_last_weights_are_exported_without_patience(tmp_path: Path) -> None:
    assert exported(tmp_path, [2.0, 1.0, 1.5], patience=None) == (None, "")


def test_last_weights_are_exported_without_a_best_value_or_its_checkpoint(
    tmp_path: Path,
) -> None:
    tag, said = exported(tmp_path, [math.nan, math.nan], patience=2)
    assert tag is None and said.endswith("no evaluation had a finite eval_loss.")
    tag, said = exported(tmp_path, [1.0, 2.0, 3.0], patience=2)
    assert (
        tag is None
        and "1, at step 1, which has no complete checkpoint" in said
        and str(tmp_path) in said
    )
