"""Machine properties that affect the flags' default values."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from openrlhf.config import machine
from openrlhf.units import GIB

INSTALLED = machine.installed_gpus  # the original function, which conftest.py patches


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 4),
        ("", 0),
        (" ", 0),
        ("0, 1", 2),
        ("0,1,", 2),
        ("0,1,2,3,4,5", 4),
        ("-1", 0),
        ("2,-1,3", 1),
        ("NoDevFiles", 0),
        ("GPU-ab", 1),
        ("MIG-ab,MIG-cd", 2),
    ],
)
def test_visible_devices_limit_the_device_count(
    visible: str | None, count: int, gpu_machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_machine(4)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine.count_gpus() == count


def test_devices_are_counted_from_the_driver_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(machine, "PROC", tmp_path)
    assert INSTALLED.__wrapped__() == 2


def test_devices_are_counted_with_nvidia_smi_if_there_are_no_driver_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: one'\necho 'GPU 1: two'\necho 'GPU 2: three'\n")
    program.chmod(0o755)
    monkeypatch.setattr(machine, "PROC", tmp_path / "none")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert INSTALLED.__wrapped__() == 3
    program.unlink()
    assert INSTALLED.__wrapped__() == 0


@pytest.mark.parametrize("cluster", [0, 16])
def test_devices_of_a_joined_ray_cluster_take_precedence(
    cluster: int, gpu_machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden devices are counted too, because Ray hides devices from a job's driver."""
    gpu_machine(4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(machine, "cluster_gpus", cluster)
    assert machine.count_gpus() == cluster


@pytest.mark.parametrize(
    ("address", "noted", "may"),
    [
        (None, False, False),
        (None, True, True),
        ("", True, True),
        ("local", True, False),
        ("10.0.0.1:6379", False, True),
    ],
)
def test_ray_may_be_running_if_an_address_or_a_file_refers_to_a_cluster(
    address: str | None, noted: bool, may: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    if noted:
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray/ray_current_cluster").write_text("10.0.0.1:6379")
    assert machine.ray_may_run() is may


def test_world_size_is_read_from_the_launcher_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.world_size() == 1
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert machine.world_size() == 4


def test_garbage_collection_resumes_if_quick_imports_fail() -> None:
    with pytest.raises(ImportError), machine.quick_imports():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("quota", "cores"), [("250000 100000", 3), ("max 100000", 6), ("1600000 100000", 6), (None, 6)]
)
def test_usable_cores_respect_affinity_and_container_quota(
    quota: str | None, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    monkeypatch.setattr(machine, "CPU_QUOTA", tmp_path / "cpu.max")
    if quota:
        (tmp_path / "cpu.max").write_text(quota)
    assert machine.usable_cores() == cores


V2, V1 = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


@pytest.mark.parametrize(
    ("own", "limited", "files", "limit", "free"),
    [
        ("0::/", "", V2, 10, 7),
        ("0::/system.slice/job.scope", "system.slice/job.scope", V2, 10, 7),
        ("0::/slurm/job_7/step_0", "slurm/job_7", V2, 10, 7),
        ("0::/slurm/job_7", "slurm/job_7", V2, None, 64),
        ("4:memory:/", "memory", V1, 10, 7),
        ("4:cpu,memory:/slurm/job_7/step_0", "memory/slurm/job_7", V1, 10, 7),
        ("4:memory:/docker/of_the_host", "memory", V1, 10, 7),
        ("4:memory:/", "memory", V1, 2**33 - 1, 64),
        ("4:cpu:/job", "memory/job", V1, 10, 64),
    ],
)
def test_free_memory_is_limited_by_the_machine_and_every_cgroup_of_the_process(
    own: str,
    limited: str,
    files: tuple[str, str, str],
    limit: int | None,
    free: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The limit is 10 GiB, of which 5 GiB are used, including 2 GiB of cached files."""
    (tmp_path / "meminfo").write_text(
        f"MemTotal: {128 * 2**20} kB\nMemAvailable: {64 * 2**20} kB\nHugePages_Total: 0\n"
    )
    (tmp_path / "own").write_text(f"9:name=systemd:/\n{own}\n")
    group = tmp_path / "groups" / limited
    group.mkdir(parents=True)
    (group / files[0]).write_text(str(limit * GIB) if limit else "max")
    (group / files[1]).write_text(str(5 * GIB))
    (group / "memory.stat").write_text(f"anon 1\n{files[2]} {2 * GIB}\n")
    monkeypatch.setattr(machine, "MEMORY_INFO", tmp_path / "meminfo")
    monkeypatch.setattr(machine, "OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(machine, "CGROUPS", tmp_path / "groups")
    assert machine.free_memory() == free * GIB


def test_free_memory_is_read_on_this_machine() -> None:
    assert machine.free_memory() > 0


@pytest.mark.parametrize(
    ("asked", "in_job", "threads"),
    [(None, False, 3), ("5", False, 5), ("1", False, 1), ("1", True, 3), ("5", True, 5)],
)
def test_openmp_threads_follow_the_user_setting_but_not_the_ray_default(
    asked: str | None, in_job: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: 6)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    if in_job:
        monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    assert machine.openmp_threads(2) == threads
