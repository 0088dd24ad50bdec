"""Tests for frozen runs of older versions.

The files of a frozen run can be opened, and a resumed run logs the older version's numbers.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from openrlhf.config.options import parse_config
from openrlhf.config.supervised import SFTConfig
from openrlhf.observability.report import write_report
from openrlhf.observability.run_folder import read_lines
from tests.e2e.commands import Finished, finish, numbers, steps_logged
from tests.goldens.frozen import FROZEN, KINDS, start
from tests.goldens.record import machine
from tests.goldens.test_goldens import differences

IN_VERIFY = ("lora", "ppo_async")


def unpack(name: str, folder: Path) -> Path:
    """Unpack a frozen run into a new location, `folder`, and return the run's folder."""
    with tarfile.open(FROZEN / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name


def resume(name: str, folder: Path) -> Finished:
    done = finish(start(KINDS[name], folder, **{"ckpt.load_enable": True}))
    assert done.status == 0, done.errors
    return done


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.verify) if name in IN_VERIFY else name for name in KINDS],
)
def test_frozen_run_resumes_with_the_recorded_numbers_and_exports_its_model(
    name: str, tmp_path: Path
) -> None:
    golden: dict[str, Any] = json.loads((FROZEN / f"{name}.json").read_text(encoding="utf-8"))
    folder = unpack(name, tmp_path)
    before = steps_logged(folder / "run")
    resume(name, folder)
    now = numbers(folder / "run")
    assert before < golden["numbers"][-1]["step"] == now[-1]["step"]
    if KINDS[name].deterministic:
        assert differences(golden["numbers"], now, name, exact=golden["machine"] == machine()) == []
    assert (folder / "run/report.html").exists()
    if KINDS[name].flags.get("ds.lora.rank"):
        assert (folder / "trained/adapter_model.safetensors").exists()
    else:
        model = AutoModelForCausalLM.from_pretrained(folder / "trained", dtype=torch.float32)
        assert all(weight.isfinite().all() for weight in model.state_dict().values())


@pytest.mark.parametrize("name", KINDS)
def test_run_folder_of_a_frozen_run_can_be_opened(name: str, tmp_path: Path) -> None:
    run = unpack(name, tmp_path) / "run"
    assert steps_logged(run) >= 3
    if name.startswith("ppo"):
        assert all("response" in row for row in read_lines(run / "samples.jsonl"))
    report = write_report(tmp_path / "report.html", {name: run}, title=name)
    assert "<html" in report.read_text(encoding="utf-8")


def test_configuration_file_of_a_frozen_run_can_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = unpack("sft", tmp_path)
    monkeypatch.chdir(folder)
    config = parse_config(SFTConfig, ["--config", "run/config.yaml"], command="train_sft")
    assert (config.adam.lr, config.train.batch_size, config.ckpt.save_steps) == (3e-3, 16, 2)
    assert config.train.enable_ema
