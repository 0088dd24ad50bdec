"""Tests that `openrlhf doctor` reports simulated faults, each with a fix."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from openrlhf.checks import Finding
from openrlhf.cli import main
from openrlhf.config import machine
from openrlhf.doctor import examination, packages, probes, resources, software
from openrlhf.doctor.examination import level
from openrlhf.files import Disk
from openrlhf.isolation.sandbox import SandboxError


def levels(findings: Iterable[Finding]) -> list[str]:
    found = list(findings)
    for finding in found:
        assert finding.passes or finding.fix, f"{finding.seen} has no fix"
    return [level(finding) for finding in found]


def returning(value: Any) -> Callable[..., Any]:
    return lambda *args, **options: value


def test_small_shared_memory_is_reported_as_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(total=64 << 20, free=64 << 20)
    monkeypatch.setattr(resources, "disk_of", returning(disk))
    [shared] = resources.shared_memory()
    assert shared.fails and "0.06 GiB" in shared.seen and "--shm-size" in shared.fix
    monkeypatch.setattr(resources, "disk_of", returning(Disk(total=2 << 30, free=2 << 30)))
    assert levels(resources.shared_memory()) == ["pass"]
    monkeypatch.setattr(machine, "count_gpus", returning(8))
    assert levels(resources.shared_memory()) == ["failure"]  # the requirement is 8 GiB


def test_missing_shared_memory_is_reported_as_a_failure_without_a_disk_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "SHM", tmp_path / "shm")
    [missing] = resources.shared_memory()
    assert missing.fails and f"{tmp_path / 'shm'} does not exist" in missing.seen
    assert "are free" not in missing.seen and str(tmp_path / "shm") in missing.fix


def test_low_free_memory_is_reported_as_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_memory", returning(3 << 30))
    assert levels(resources.memory()) == ["warning"]


def test_missing_and_outdated_requirements_are_reported_as_failures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed = machine.installed
    assert "failure" not in levels(packages.requirements())

    def without_ray(name: str) -> Any:
        return None if name == "ray" else installed(name)

    monkeypatch.setattr(machine, "installed", without_ray)
    [missing] = [finding for finding in packages.requirements() if finding.fails]
    assert "ray" in missing.seen and "pip install 'ray" in missing.fix
    monkeypatch.setattr(machine, "installed", lambda name: installed("packaging"))
    outdated = [finding.seen for finding in packages.requirements() if finding.fails]
    assert any("transformers" in seen for seen in outdated)


def test_another_installed_openrlhf_package_is_reported_as_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert packages.other_package() == []
    folder = tmp_path / "openrlhf-0.11.2.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Name: openrlhf\nVersion: 0.11.2\nAuthor: OpenRLHF Team\n")
    monkeypatch.syspath_prepend(tmp_path)
    [found] = packages.other_package()
    assert found.fails and "0.11.2" in found.seen and "pip uninstall openrlhf" in found.fix


def test_unreachable_hub_is_reported_as_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    [found] = resources.hub()
    assert level(found) == "warning"
    assert "http://127.0.0.1:1" in found.seen and "HF_HUB_OFFLINE" in found.fix
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert levels(resources.hub()) == ["pass"]


def test_low_limits_are_reported_as_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", returning((256, 1024)))
    files, processes = resources.limits()
    assert "1024" in files.seen and "ulimit -n" in files.fix
    assert "1024" in processes.seen and "ulimit -u" in processes.fix
    unlimited = (256, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", returning(unlimited))
    found = list(resources.limits())
    assert levels(found) == ["pass", "pass"]
    assert not any("-1" in finding.seen for finding in found)


def test_full_disks_and_read_only_disks_are_reported_as_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(resources, "disk_of", returning(Disk(total=20 << 30, free=20 << 30)))
    assert levels(resources.disks()) == ["pass"] * 3
    monkeypatch.setattr(resources.os, "access", lambda path, mode: path != tmp_path)
    assert levels(resources.disks())[0] == "warning"
    monkeypatch.setattr(resources, "disk_of", returning(Disk(total=20 << 30, free=1 << 30)))
    assert levels(resources.disks()) == ["warning"] * 3


def test_missing_sandbox_protection_is_reported_as_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken() -> list[str]:
        raise SandboxError("the sandbox does not work here")

    monkeypatch.setattr(resources, "missing_protection", lambda: ["no Landlock", "no seccomp"])
    [found] = resources.sandbox()
    assert level(found) == "warning"
    assert "no Landlock" in found.seen and "no seccomp" in found.seen
    monkeypatch.setattr(resources, "missing_protection", broken)
    assert levels(resources.sandbox()) == ["warning"]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
        ("raise ImportError('undefined symbol: _ZN3c10')", "undefined symbol"),
        ("import time; time.sleep(60)", "timed out"),
        ("import os; os._exit(3)", "exit status 3"),
        ("import os; os._exit(0)", "printed ''"),
        ("import os; os.write(1, b'no result'); os._exit(0)", "printed 'no result'"),
    ],
)
def test_broken_library_is_reported_as_a_failure_with_its_error(
    code: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_library.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    if "sleep" in code:
        monkeypatch.setattr(probes, "TIMEOUT_S", 1.0)
    package = packages.Distribution.from_name("ray")
    with pytest.raises(probes.ProbeError) as caught:
        list(software.library(package, "broken_library", "Reinstall it."))
    assert caught.value.finding.fails and said in caught.value.finding.seen
    assert caught.value.finding.fix == "Reinstall it."


def test_torch_without_gpu_access_is_reported_as_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "count_gpus", returning(2))
    monkeypatch.setattr(software, "probe", returning(("torch 2.13.0+cpu", [])))
    [found] = software.torch()
    assert found.fails and "2 GPUs" in found.seen and "docs/gpu.md" in found.fix
    devices = [("H100", 80 << 30, 80 << 30), ("H100", 10 << 30, 80 << 30)]
    monkeypatch.setattr(software, "probe", returning(("torch 2.13.0, CUDA 13.0", devices)))
    assert levels(software.torch()) == ["pass", "pass", "warning"]


def test_driver_is_shown_only_on_machines_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "count_gpus", returning(0))
    monkeypatch.setattr(software, "probe", returning(("torch 2.13.0+cpu", [])))
    monkeypatch.setattr(software, "nvidia_driver", returning(None))
    assert [finding.seen for finding in software.torch()] == ["torch 2.13.0+cpu"]
    monkeypatch.setattr(software, "nvidia_driver", returning("580.1"))
    assert [finding.seen for finding in software.torch()] == ["torch 2.13.0+cpu, driver 580.1"]


def test_missing_deepspeed_is_reported_only_as_a_missing_requirement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "installed", returning(None))
    [compiler] = software.deepspeed()
    assert compiler.seen.startswith("Compiler")
    assert any("deepspeed" in found.seen and found.fails for found in packages.requirements())


def test_cluster_without_the_gpus_of_the_machine_is_reported_as_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "installed_gpus", returning(8))
    monkeypatch.setattr(software, "probe", returning((1, 0)))
    assert levels(software.ray()) == ["failure"]
    monkeypatch.setattr(software, "probe", returning((2, 16)))
    assert levels(software.ray()) == ["pass"]


def test_unreachable_ray_address_is_reported_as_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(probes.ProbeError) as caught:
        list(software.ray())
    assert "No Ray cluster answers at RAY_ADDRESS 127.0.0.1:1" in caught.value.finding.seen


def test_torch_check_passes_on_the_test_machine() -> None:
    assert "failure" not in levels(software.torch())


def test_missing_optional_package_is_reported_with_the_flags_that_need_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "installed", returning(None))
    [finding] = software.optional("bitsandbytes")
    assert finding.passes
    assert "--ds.load_in_4bit" in finding.seen and "--optim adam_8bit" in finding.seen


@pytest.mark.parametrize("fails", [False, True])
def test_command_prints_findings_and_exits_with_status_1_after_a_failure(
    fails: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def check() -> list[Finding]:
        return [Finding("fine", passes=True), Finding("slow", "Wait."), Finding("x", "y", fails)]

    def missing() -> list[Finding]:
        raise ModuleNotFoundError(name="httpx")

    monkeypatch.setattr(examination, "CHECKS", [check])
    with pytest.raises(SystemExit) as ended:
        main.main(["doctor", "--json"])
    assert ended.value.code == int(fails)
    assert json.loads(capsys.readouterr().out) == [
        {"level": "pass", "seen": "fine", "fix": ""},
        {"level": "warning", "seen": "slow", "fix": "Wait."},
        {"level": "failure" if fails else "warning", "seen": "x", "fix": "y"},
    ]
    monkeypatch.setattr(examination, "CHECKS", [missing, check])
    with pytest.raises(SystemExit) as ended:
        main.main(["doctor"])
    assert ended.value.code == 1
    printed = capsys.readouterr().out
    assert "httpx" in printed and "slow Wait." in printed


@pytest.mark.verify
def test_doctor_finds_no_failure_in_the_test_environment(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(["doctor"])
    assert ended.value.code == 0, capsys.readouterr().out
