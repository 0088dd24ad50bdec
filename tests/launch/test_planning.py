"""Tests for `openrlhf plan`, and for the memory plan that a run prints at the start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from openrlhf.checks import CheckError, report
from openrlhf.cli import plan as plan_program
from openrlhf.config import machine
from openrlhf.config.flags import amend
from openrlhf.config.shared import DeepSpeedConfig
from openrlhf.files import Disk
from openrlhf.launch import planning
from openrlhf.launch.planning import (
    drive_findings,
    memory_findings,
    plan_lines,
    plan_of_run,
    this_machine,
)
from openrlhf.planning.cluster import Cluster
from openrlhf.planning.plan import make_plan
from openrlhf.planning.usage import Instant
from openrlhf.units import MIB
from tests.config.commands import sft
from tests.planning.models import write_models
from tests.tiny import tiny_config


@pytest.fixture(autouse=True)
def undo_globals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo changes that a plan makes to the numbers of GPUs and processes.

    Otherwise, a failing command whose plan has several processes would end the test process.
    """
    monkeypatch.setattr("openrlhf.cli.common.leave", lambda status: None)
    monkeypatch.setattr(machine, "cluster_gpus", None)
    monkeypatch.setattr(machine, "only_plans", False)
    monkeypatch.setenv("WORLD_SIZE", "1")


@pytest.fixture
def paths(tmp_path: Path) -> dict[str, str]:
    return write_models(tmp_path)


def machine_with(mebibytes: int) -> Cluster:
    return Cluster(device_bytes=mebibytes * MIB, on_gpus=False)


def test_arguments_are_split_between_plan_and_the_planned_command() -> None:
    line = "sft --ds.zero_stage 3 --cluster 4x24GB --json --train.batch_size=8 --longest"
    own, planned = plan_program.split(line.split())
    assert own == ["--command", "sft", "--cluster", "4x24GB", "--json", "--longest"]
    assert planned == ["--ds.zero_stage", "3", "--train.batch_size=8"]


def test_plan_prints_the_help_of_its_own_flags_for_a_word(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert plan_program.split(["sft", "--help", "largest"])[1] == []
    with pytest.raises(SystemExit):
        plan_program.main(["--help", "largest"])
    printed = capsys.readouterr().out
    assert "--longest" in printed and "--speed" not in printed


def test_plan_prints_table_verdict_and_flags_that_fit(
    paths: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    line = f"sft --model.model_name_or_path {paths['llama2-7b']} --cluster 4x24GB --longest"
    plan_program.main(line.split())
    printed = capsys.readouterr()
    for word in ("policy", "weights", "does not fit", "--ds.adam_offload", "--data.max_len"):
        assert word in printed.out
    assert "--data.dataset is required" in printed.err


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--cluster 4x24GB", "--data.max_len 128 is already too long"),
        ("--cluster 8xH100 --ds.zero_stage 3 --train.batch_size 8", "has only 4096 positions"),
    ],
)
def test_longest_length_names_what_limits_it(
    paths: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: str,
    expected: str,
) -> None:  # fmt: skip
    config = json.loads(Path(paths["llama2-7b"], "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    line = f"sft --model.model_name_or_path {tmp_path} {flags} --longest"
    plan_program.main([*line.split(), "--model.gradient_checkpointing_enable"])
    assert expected in capsys.readouterr().out


def test_json_plan_lists_bytes_for_each_instant_model_and_kind(
    paths: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    line = f"sft --model.model_name_or_path {paths['llama2-7b']} --cluster 8xH100 --json"
    plan_program.main(line.split())
    found = json.loads(capsys.readouterr().out)
    step = found["pools"][0]["instants"]["step"]
    assert step["total"] == sum(sum(kinds.values()) for kinds in step["models"].values())
    assert found["measured"] is False
    assert found["fits"] == (found["nearest"] is None) if "nearest" in found else found["fits"]


def test_speed_of_rl_step_lists_its_phases(
    paths: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    line = (
        f"ppo --actor.model_name_or_path {paths['llama2-7b']} --algo.advantage.estimator "
        "reinforce --train.colocate_all --cluster 8xH100-80GB --speed --ds.zero_stage 3"
    )
    plan_program.main(line.split())
    printed = capsys.readouterr().out
    for word in ("generate", "score", "train policy", "communication"):
        assert word in printed


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("sft --cluster 4x24GB", "--model.model_name_or_path"),
        ("sft --model.model_name_or_path {path} --cluster 4xFOO", "4xFOO"),
        ("sft --model.model_name_or_path {path} --cluster 4x24GB --ds.zero_stage 7", "--ds.zero"),
        (
            "sft --model.model_name_or_path {path} --cluster 3x24GB --train.batch_size 8",
            "--train.batch_size 8 is not divisible by the 3 ",
        ),
        ("sft --model.model_name_or_path ./no-such-folder --cluster 4x24GB", "no-such-folder"),
        (
            "sft --model.model_name_or_path {path} --cluster 3x24GB --ds.ring_attn_size 2",
            "--ds.ring_attn_size 2",
        ),
        (
            "sft --model.model_name_or_path {path} --cluster 3x24GB --ds.tensor_parallel_size 3",
            "--ds.tensor_parallel_size 3",
        ),
        (
            "ppo --actor.model_name_or_path {path} --cluster 8x80GB --vllm.num_engines 1 "
            "--algo.advantage.estimator reinforce --vllm.tensor_parallel_size 3 "
            "--actor.num_gpus_per_node 1 --ref.num_gpus_per_node 1",
            "--vllm.tensor_parallel_size 3",
        ),
        ("--cluster 4x24GB", "--command"),
        ("reward_test --cluster 4x24GB", "--command"),
    ],
)
def test_user_mistakes_are_reported_with_exit_status_2(
    line: str, named: str, paths: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        plan_program.main(line.format(path=paths["llama2-7b"]).split())
    assert exit_.value.code == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize("flags", ["--optim adam_8bit", "--ds.load_in_4bit --ds.lora.rank 8"])
def test_plan_does_not_need_bitsandbytes(
    flags: str,
    paths: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    installed = machine.installed
    monkeypatch.setattr(
        machine, "installed", lambda name: None if name == "bitsandbytes" else installed(name)
    )
    line = f"sft --model.model_name_or_path {paths['llama2-7b']} --cluster 8xH100-80GB {flags}"
    plan_program.main(line.split())
    assert "bitsandbytes" not in capsys.readouterr().err


def test_run_of_a_small_model_has_a_plan_for_this_machine(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(tiny_config("qwen2-tied").to_json_string())
    config = amend(sft(), {"model.model_name_or_path": str(tmp_path)})
    planned = plan_of_run(config)
    assert planned
    assert planned.cluster.device_bytes == pytest.approx(this_machine().device_bytes, rel=0.2)
    assert planned.pools[0].total(Instant.STEP) > 0
    assert any("policy" in line for line in plan_lines(planned))


def test_run_without_a_known_model_has_no_plan() -> None:
    config = amend(sft(), {"model.model_name_or_path": "./no-such-folder"})
    assert plan_of_run(config) is None
    assert plan_lines(None) == []
    assert memory_findings(config, None) == []


def test_run_that_does_not_fit_gets_a_notice_with_flags(paths: dict[str, str]) -> None:
    config = amend(
        sft("--train.micro_batch_size 8"), {"model.model_name_or_path": paths["llama2-7b"]}
    )
    pool = make_plan(config, machine_with(1 << 30)).pools[0]
    backward, step = pool.total(Instant.BACKWARD), pool.total(Instant.STEP)
    assert pool.peak is Instant.BACKWARD  # activations, which fewer tokens at a time make smaller
    between = make_plan(config, machine_with((backward + step) // 2 // MIB))
    [finding] = memory_findings(config, between)
    assert not finding.fails
    assert "--model.gradient_checkpointing_enable" in finding.fix or "micro" in finding.fix


def test_run_whose_weights_do_not_fit_is_refused(paths: dict[str, str]) -> None:
    config = amend(sft(), {"model.model_name_or_path": paths["llama2-7b"]})
    found = memory_findings(config, make_plan(config, machine_with(4096)))
    with pytest.raises(CheckError, match="does not fit"):
        report(*found)


def test_run_that_fits_produces_no_findings(paths: dict[str, str]) -> None:
    config = amend(sft(), {"model.model_name_or_path": paths["llama2-7b"]})
    assert memory_findings(config, make_plan(config, machine_with(1 << 30))) == []


def on_drive(folder: Path) -> DeepSpeedConfig:
    return DeepSpeedConfig(zero_stage=3, nvme_path=str(folder))


def test_drive_with_enough_space_produces_no_findings(tmp_path: Path) -> None:
    assert drive_findings(DeepSpeedConfig(), None) == []
    assert drive_findings(on_drive(tmp_path / "new"), None) == []
    assert list(tmp_path.iterdir()) == []


def test_drive_with_too_little_space_is_refused_with_both_sizes(
    tmp_path: Path, paths: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = f"--ds.zero_stage 3 --ds.nvme_path {tmp_path}"
    config = amend(sft(flags), {"model.model_name_or_path": paths["llama2-7b"]})
    plan = make_plan(config, Cluster(device_bytes=80 << 30, per_node=8))
    [pool] = plan.pools
    monkeypatch.setattr(planning, "disk_of", lambda folder: Disk(1 << 50, pool.drive_bytes - 1))
    [finding] = drive_findings(config.ds, plan)
    assert finding.fails
    assert finding.seen.startswith(f"--ds.nvme_path {tmp_path} has 126 GiB of free space")
    monkeypatch.setattr(planning, "disk_of", lambda folder: Disk(1 << 50, pool.drive_bytes))
    assert drive_findings(config.ds, plan) == []


def test_space_is_that_of_the_processes_on_this_machine(
    tmp_path: Path, paths: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = f"--ds.zero_stage 3 --ds.nvme_path {tmp_path}"
    config = amend(sft(flags), {"model.model_name_or_path": paths["llama2-7b"]})
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setattr(machine, "count_gpus", lambda: 4)
    monkeypatch.setattr(machine, "gpu_memory", lambda: 80 << 30)
    everything = plan_of_run(config)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    half = plan_of_run(config)
    assert everything is not None and half is not None
    assert half.pools[0].drive_bytes == everything.pools[0].drive_bytes // 2
    assert half.devices == everything.devices == 8


def test_drive_of_this_machine_is_only_a_notice_if_the_run_joined_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(machine, "cluster_gpus", 8)
    [finding] = drive_findings(on_drive(tmp_path / "file" / "folder"), None)
    assert not finding.fails


def test_folder_in_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "file_system", lambda folder: "tmpfs")
    [finding] = drive_findings(on_drive(tmp_path), None)
    assert finding.fails
    assert "--ds.adam_offload" in finding.fix


def test_folder_in_which_no_file_can_be_created_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    [finding] = drive_findings(on_drive(tmp_path / "file" / "folder"), None)
    assert finding.fails
    assert f"--ds.nvme_path {tmp_path}/file/folder" in finding.seen
