"""Tests of universal checkpoints: a run on a different number of ranks resumes identically."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from openrlhf.checkpoints.manifest import Checkpoint, CheckpointError, EngineLayout, RunState
from tests.ranks import run_ranks
from tests.tiny import save_tiny_model

HALF, WHOLE = 2, 4  # steps before the resume, and total steps


def run(ranks: int, model: str, *runs: list[Any]) -> None:
    run_ranks(ranks, "tests.training.universal_worker", model, json.dumps(runs), timeout=300)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param((2, [(3, "fp32")]), (1, [(3, "fp32")]), id="two ranks of ZeRO 3 to one"),
        *(
            pytest.param(before, after, id=name, marks=pytest.mark.verify)
            for name, before, after in [
                ("two ranks to one", (2, [(2, "fp32"), (3, "fp32")]),
                 (1, [(1, "fp32"), (3, "fp32")])),
                ("one rank to two", (1, [(1, "fp32"), (3, "fp32")]),
                 (2, [(2, "fp32"), (3, "fp32")])),
                ("the stage alone", (2, [(1, "fp32"), (2, "fp32")]),
                 (2, [(2, "fp32"), (1, "fp32")])),
                ("not cut", (2, [(0, "fp32")]), (1, [(0, "fp32")])),
                ("bfloat16", (2, [(0, "bf16"), (2, "bf16"), (3, "bf16")]),
                 (1, [(0, "bf16"), (1, "bf16"), (3, "bf16")])),
                ("four ranks", (2, [(2, "fp32"), (3, "fp32")]), (4, [(2, "fp32"), (3, "fp32")])),
            ]
        ),
    ],
)  # fmt: skip
def test_run_resumes_on_a_different_number_of_ranks(
    before: tuple[int, list[tuple[int, str]]],
    after: tuple[int, list[tuple[int, str]]],
    tmp_path: Path,
) -> None:
    model = save_tiny_model(tmp_path / "model")
    (ranks, layouts), (later_ranks, later) = before, after
    places = [tmp_path / f"{place} (1+)" for place in range(len(layouts))]
    run(
        ranks,
        model,
        *(
            [*layout, 0, HALF, None, f"{place}-half"]
            for layout, place in zip(layouts, places, strict=True)
        ),
        *(
            [*layout, 0, WHOLE, None, f"{place}-whole"]
            for layout, place in zip(layouts, places, strict=True)
        ),
    )
    run(
        later_ranks,
        model,
        *(
            [*layout, HALF, WHOLE, f"{place}-half", f"{place}-rest"]
            for layout, place in zip(later, places, strict=True)
        ),
    )
    for place, (_, dtype) in zip(places, layouts, strict=True):
        tolerance = 2e-6 if dtype == "fp32" else 4e-3
        rates, norms = json.loads(Path(f"{place}-whole/found.json").read_text())
        rest_rates, rest_norms = json.loads(Path(f"{place}-rest/found.json").read_text())
        assert rest_rates == pytest.approx(rates[HALF:], rel=1e-12) and len(set(rates)) == WHOLE
        assert rest_norms == pytest.approx(norms[HALF:], rel=tolerance * 10)
        whole, half, rest = (
            torch.load(f"{place}-{part}/weights.pt") for part in ("whole", "half", "rest")
        )
        assert set(rest) == set(whole)
        for name, weight in whole.items():
            assert (rest[name] - weight).abs().max() < tolerance, name
        assert max(float((half[name] - whole[name]).abs().max()) for name in whole) > 8 * tolerance
        assert sorted(path.name for path in Path(f"{place}-half").iterdir() if path.is_dir()) == [
            "saved"
        ]


@pytest.mark.verify
def test_error_names_the_checkpoint_that_cannot_be_converted(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    run(2, model, [2, "fp32", 0, 1, None, str(tmp_path / "first")])
    damaged = tmp_path / "damaged"
    shutil.copytree(tmp_path / "first", damaged)
    for file in damaged.glob("saved/*_optim_states.pt"):
        file.write_bytes(b"")
    with pytest.raises(
        AssertionError,
        match=r"saved in .*damaged .*\(--ds.use_universal_ckpt\)",
    ):
        run(1, model, [2, "fp32", 1, 2, str(damaged), str(tmp_path / "second")])


def checkpoint(**engines: EngineLayout) -> Checkpoint:
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
    ],
)  # fmt: skip
def test_unconvertible_checkpoint_is_rejected_with_both_layouts(
    now: dict[str, Any], converts: bool, refused: str | None
) -> None:
    then = checkpoint(_actor=EngineLayout(world_size=2, zero_stage=2))

    def check() -> None:
        run = RunState(step=0, engines={"_actor": EngineLayout(**now)}, identity={"seed": 1})
        then.check_continued_by(run, layout="layout", converts=converts)

    if not refused:
        return check()
    with pytest.raises(CheckpointError, match=refused):
        check()
