"""Tests of state in files on a drive (--ds.nvme_path)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from openrlhf.config.flags import UserError
from openrlhf.training import drive
from openrlhf.training.drive import StateOnDrive, is_on_drive
from tests.training.optimizer_worker import Case, run_all

SIZE = drive.MIN_BYTES // 4  # number of float32 elements of the smallest tensor in a file


def test_large_flat_tensors_are_created_in_files_without_names(tmp_path: Path) -> None:
    source = torch.arange(SIZE, dtype=torch.float32)
    with StateOnDrive(str(tmp_path / "new"), has_weights=False):
        zeros = torch.zeros(SIZE)
        like = torch.zeros_like(source, dtype=torch.float64, device="cpu")
        copy = source.clone()
        in_memory = [
            torch.zeros(SIZE - 1),
            torch.zeros(2, SIZE),
            torch.empty(SIZE),
            torch.ones(SIZE),
            torch.zeros(SIZE, device="meta"),
        ]
    assert is_on_drive(zeros)
    assert is_on_drive(like)
    assert is_on_drive(copy)
    assert not any(is_on_drive(tensor) for tensor in in_memory if tensor.device.type != "meta")
    assert in_memory[-1].device.type == "meta"
    assert like.dtype == torch.float64
    assert not zeros.any()
    assert not like.any()
    torch.testing.assert_close(copy, source, atol=0, rtol=0)
    assert list((tmp_path / "new").iterdir()) == []
    assert not is_on_drive(torch.zeros(SIZE))


def test_shards_of_weights_are_in_files_and_are_not_pinned(tmp_path: Path) -> None:
    with StateOnDrive(str(tmp_path), has_weights=True):
        shard = torch.empty(SIZE * 2, dtype=torch.bfloat16)
        pinned = shard.pin_memory()
    assert is_on_drive(shard)
    assert pinned is shard
    assert shard.dtype == torch.bfloat16


def test_state_read_from_a_checkpoint_is_moved_to_files(tmp_path: Path) -> None:
    def optimizer() -> torch.optim.Adam:
        weights = [torch.nn.Parameter(torch.zeros(size)) for size in (SIZE, 4)]
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        return torch.optim.Adam(weights)

    saved = optimizer()
    saved.step()
    torch.save(saved.state_dict(), tmp_path / "saved.pt")
    resumed = optimizer()
    with StateOnDrive(str(tmp_path), has_weights=False).reading(resumed):
        read = torch.load(tmp_path / "saved.pt")
        resumed.load_state_dict(read)
    large, small = resumed.state.values()
    assert is_on_drive(large["exp_avg"])
    assert is_on_drive(large["exp_avg_sq"])
    # A tensor that stayed mapped would keep the checkpoint's blocks after its files are deleted.
    mapped = read["state"][1]["exp_avg"]
    assert small["exp_avg"].data_ptr() != mapped.data_ptr()
    for expected, found in zip(saved.state.values(), resumed.state.values(), strict=True):
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_full_drive_is_reported_with_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_full(file: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(drive.os, "posix_fallocate", is_full)
    message = f"--ds.nvme_path {tmp_path}: .* No space left on device"
    with StateOnDrive(str(tmp_path), has_weights=False), pytest.raises(UserError, match=message):
        torch.zeros(SIZE)
    assert list(tmp_path.iterdir()) == []


BASE = Case(zero=3, dtype="bf16", optim="adam", offload=True)
KINDS = {
    "bf16": BASE,
    "fp32": replace(BASE, dtype="fp32"),
    "one rank": replace(BASE, ranks=1),
    "Muon": replace(BASE, optim="muon"),
    "8-bit Adam": replace(BASE, optim="adam_8bit"),
    "LoRA": replace(BASE, lora=4),
    "ring": replace(BASE, sp=2),
    "tensor parallelism": replace(BASE, tp=2),
    "second copy": replace(BASE, zpg=2),
}


def on_drive(case: Case) -> list[Case]:
    """Return the same run with its optimizer state, and also its weights, in files.

    Both runs resume from a checkpoint in a new engine.
    """
    moved = replace(case, offload=False, resume_at=2)
    return [replace(moved, nvme="optimizer"), replace(moved, nvme="all")]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, list[dict[str, Tensor]]]:
    cases: list[Case] = []
    for case in KINDS.values():
        cases += [case, *on_drive(case)]
    folder = tmp_path_factory.mktemp("drive")
    found = run_all(cases, folder)
    assert list((folder / "drive").iterdir()) == []
    return found


@pytest.mark.verify
@pytest.mark.parametrize("kind", KINDS)
def test_runs_resumed_with_state_on_a_drive_equal_an_uninterrupted_run_in_memory(
    results: dict[Case, list[dict[str, Tensor]]], kind: str
) -> None:
    expected = results[KINDS[kind]]
    for case in on_drive(KINDS[kind]):
        assert len(results[case]) == len(expected) == case.steps + 2  # the last one is the EMA
        for found, wanted in zip(results[case], expected, strict=True):
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[name], weight) for name, weight in wanted.items())
