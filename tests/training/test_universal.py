"""Tests for universal checkpoints: runs continue unchanged in a different layout of ranks."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from openrlhf.checkpoints.manifest import Checkpoint, CheckpointError, RunState, StateLayout
from tests.ranks import ROOT
from tests.tiny import save_tiny_model

HALF, WHOLE = 2, 4  # steps before the resume, and total steps
Fields = dict[str, Any]  # fields of `universal_worker.Job`


def run(model: Path | str, *worlds: list[Fields]) -> None:
    """Run lists of jobs, each list in its own world of processes.

    Raises AssertionError with the output if a job fails.
    """
    command = [sys.executable, "-m", "tests.training.universal_worker", model, json.dumps(worlds)]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    for jobs in worlds:
        for job in jobs:
            assert Path(job["target"], "found.pt").exists(), finished.stdout + finished.stderr


def job(folder: Path, part: str, first: int, last: int, layout: Fields) -> Fields:
    """Return a job that saves its checkpoint in `folder-part`."""
    place = {"first": first, "last": last, "source": None, "target": f"{folder}-{part}"}
    return place | layout


TP2 = {"ranks": 2, "tp": 2}
SP2 = {"ranks": 2, "sp": 2}
AVERAGED = {"lora": True, "average": True}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        pytest.param(
            "llama",
            [
                ({**TP2, "zero": 3, "average": True}, {"ranks": 1, "zero": 3, "average": True}),
                ({**TP2, "zero": 2, "average": True}, {"ranks": 1, "zero": 1, "average": True}),
            ],
            id="one process",
        ),
        *(
            pytest.param(kind, changes, id=name, marks=pytest.mark.verify)
            for name, kind, changes in [
                ("two ranks to one", "llama",
                 [({"ranks": 2, "zero": 2}, {"ranks": 1, "zero": 1}),
                  ({"ranks": 2, "zero": 3, "average": True},
                   {"ranks": 1, "zero": 3, "average": True}),
                  ({"ranks": 2, "zero": 3, "lora": True},
                   {"ranks": 1, "zero": 3, "lora": True})]),
                ("two ranks to one, with state on a drive", "llama",
                 [({"ranks": 2, "zero": 3, "dtype": "bf16", "average": True, "drive": True},
                   {"ranks": 1, "zero": 3, "dtype": "bf16", "average": True, "drive": True})]),
                ("two ranks to one, with state in CPU memory", "llama",
                 [({"ranks": 2, "zero": stage, "offload": True},
                   {"ranks": 1, "zero": after, "offload": True})
                  for stage, after in ((2, 1), (3, 3))]),
                ("one rank to two", "llama",
                 [({"ranks": 1, "zero": stage}, {"ranks": 2, "zero": max(2, stage)})
                  for stage in (1, 3)]),
                ("the stage alone", "llama",
                 [({"ranks": 2, "zero": 1}, {"ranks": 2, "zero": 2}),
                  ({"ranks": 2, "zero": 2}, {"ranks": 2, "zero": 1})]),
                ("not cut", "llama", [({"ranks": 2, "zero": 0}, {"ranks": 1, "zero": 0})]),
                ("bfloat16", "llama",
                 [({"ranks": 2, "zero": stage, "dtype": "bf16"},
                   {"ranks": 1, "zero": min(stage, 1) if stage < 3 else 3, "dtype": "bf16"})
                  for stage in (0, 2, 3)]),
                ("four ranks", "llama",
                 [({"ranks": 2, "zero": stage}, {"ranks": 4, "zero": stage}) for stage in (2, 3)]),
                ("one rank to tensor parallelism", "qwen3",
                 [({"ranks": 1, "zero": stage, **more}, {**TP2, "zero": stage, **more})
                  for stage in (1, 3) for more in ({"average": True}, AVERAGED)]),
                ("tensor parallelism to data slices", "qwen3",
                 [({**TP2, "zero": stage, **more}, {"ranks": 2, "zero": stage, **more})
                  for stage in (2, 3)
                  for more in ({"average": True}, AVERAGED, {"dtype": "bf16", "average": True})]),
                ("tensor parallelism to a ring", "qwen3-moe",
                 [({**TP2, "zero": 2}, {**SP2, "zero": 1})]),
                ("a ring to tensor parallelism", "gemma3",
                 [({**SP2, "zero": 2}, {**TP2, "zero": 2})]),
                ("four ranks of tensor parallelism and data to a ring", "llama",
                 [({"ranks": 4, "tp": 2, "zero": stage, **more}, {**SP2, "zero": stage, **more})
                  for stage in (2, 3) for more in ({"average": True}, AVERAGED)]),
                ("tensor parallelism to more data slices", "llama-odd",
                 [({**TP2, "zero": stage, "average": True},
                   {"ranks": 4, "tp": 2, "zero": stage, "average": True}) for stage in (1, 3)]),
                ("tensor parallelism to itself with rings", "llama",
                 [({**TP2, "zero": stage}, {"ranks": 4, "tp": 2, "sp": 2, "zero": stage})
                  for stage in (2, 3)]),
            ]
        ),
    ],
)  # fmt: skip
def test_run_resumes_in_a_different_layout(
    kind: str, changes: list[tuple[Fields, Fields]], tmp_path: Path
) -> None:
    model = save_tiny_model(tmp_path / "model", kind)
    folders = [tmp_path / f"{number} (1+)" for number in range(len(changes))]
    # DeepSpeed cannot build an ordinary engine after a tensor-parallel engine.
    worlds: dict[tuple[bool, int, int], list[Fields]] = {}
    for folder, (before, after) in zip(folders, changes, strict=True):
        start = worlds.setdefault((False, before["ranks"], before.get("tp", 1)), [])
        start.append(job(folder, "half", 0, HALF, before))
        start.append(job(folder, "whole", 0, WHOLE, before))
        rest = worlds.setdefault((True, after["ranks"], after.get("tp", 1)), [])
        rest.append(job(folder, "rest", HALF, WHOLE, after) | {"source": f"{folder}-half"})
    run(model, *(worlds[key] for key in sorted(worlds)))
    for folder, (before, _) in zip(folders, changes, strict=True):
        check_resumed(folder, tolerance=4e-3 if before.get("dtype") == "bf16" else 2e-6)


def check_resumed(folder: Path, tolerance: float) -> None:
    """Check that the resumed run ends like the uninterrupted run."""
    half, whole, rest = (
        torch.load(f"{folder}-{part}/found.pt") for part in ("half", "whole", "rest")
    )
    assert rest["rates"] == pytest.approx(whole["rates"][HALF:], rel=1e-12)
    assert len(set(whole["rates"])) == WHOLE
    assert rest["norms"] == pytest.approx(whole["norms"][HALF:], rel=tolerance * 10)
    for kind in {"weights", "average"} & set(whole):
        assert set(rest[kind]) == set(whole[kind])
        moved = 0.0
        for name, weight in whole[kind].items():
            assert (rest[kind][name] - weight).abs().max() < tolerance, name
            moved = max(moved, float((half[kind][name] - weight).abs().max()))
        assert moved > 8 * tolerance
    folders = [path.name for path in Path(f"{folder}-half").iterdir() if path.is_dir()]
    assert folders == ["saved"]


@pytest.mark.verify
def test_error_names_the_checkpoint_that_cannot_be_converted(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    run(model, [job(tmp_path / "run", "first", 0, 1, {"ranks": 2})])
    damaged = tmp_path / "damaged"
    shutil.copytree(tmp_path / "run-first", damaged)
    for file in damaged.glob("saved/*_optim_states.pt"):
        file.write_bytes(b"")
    second = job(tmp_path / "run", "second", 1, 2, {"source": str(damaged)})
    with pytest.raises(
        AssertionError,
        match=r"saved in .*damaged .*\(--ds.use_universal_ckpt\)",
    ):
        run(model, [second])


def checkpoint(**engines: StateLayout) -> Checkpoint:
    return Checkpoint(
        directory=Path("/c"), tag="global_step3", nonce="n", places=(), sequence=1, files={},
        metric_key=None, metric_value=None,
        state=RunState(step=3, engines=engines, identity={"seed": 1}),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("now", "converts", "refused"),
    [
        ({"world_size": 2, "zero_stage": 2}, False, None),
        ({"world_size": 4, "zero_stage": 2}, False, "--ds.use_universal_ckpt"),
        ({"world_size": 4, "zero_stage": 2}, True, None),
        ({"world_size": 4, "zero_stage": 1}, True, None),
        ({"world_size": 2, "zero_stage": 3}, True,
         r"was .*ZeRO stage 2 .*, now .*ZeRO stage 3 .*\n.*--ds\.use_universal_ckpt"),
        ({"world_size": 4, "zero_stage": 0}, True, "ZeRO stage 0"),
        ({"world_size": 4, "zero_stage": 2, "param_dtype": "fp32"}, True, "in fp32"),
        ({"world_size": 2, "zero_stage": 2, "tensor_parallel_size": 2}, False,
         "--ds.use_universal_ckpt"),
        ({"world_size": 4, "zero_stage": 1, "tensor_parallel_size": 2}, True, None),
    ],
)  # fmt: skip
def test_error_for_an_unconvertible_checkpoint_names_both_layouts(
    now: dict[str, Any], converts: bool, refused: str | None
) -> None:
    then = StateLayout(world_size=2, zero_stage=2)
    if not refused:
        return check_layout(then, StateLayout(**now), converts)
    with pytest.raises(CheckpointError, match=refused):
        check_layout(then, StateLayout(**now), converts)


def check_layout(then: StateLayout, now: StateLayout, converts: bool) -> None:
    """Raise CheckpointError if a run cannot continue a checkpoint from another layout."""
    run = RunState(step=0, engines={"_actor": now}, identity={"seed": 1})
    checkpoint(_actor=then).check_continued_by(run, layout="layout", converts=converts)


def test_tensor_parallel_size_cannot_be_converted_with_zero_0() -> None:
    then, now = (
        StateLayout(world_size=2, tensor_parallel_size=size, zero_stage=0) for size in (1, 2)
    )
    with pytest.raises(CheckpointError, match=r"tensor parallel size 1, .*now .*size 2"):
        check_layout(then, now, converts=True)
