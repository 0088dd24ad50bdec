"""Frozen runs, which were killed halfway and archived.

Tests check that later commits can open and resume frozen runs. `python -m tests.goldens.frozen`
creates missing archives.

An archive in `frozen/` contains the folder of a killed run: model, data, user files, configuration
file, run folder and checkpoints. A JSON file next to the archive contains the numbers that an
uninterrupted run logs. A frozen run is never recreated, because old checkpoints do not change.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from tests.e2e.commands import finish, kill_when, launch, numbers, steps_logged, write_rows
from tests.goldens.record import HERE, commit, machine
from tests.goldens.rows import copying_rows, preference_rows
from tests.ranks import ROOT
from tests.tiny import HEADS, character_tokenizer, save_reward_model, save_tiny_model

FROZEN = HERE / "frozen"
USER_FILES = HERE / "frozen_files"
CONFIG = "run.yaml"
KILL_AFTER = 3  # number of steps before the kill; checkpoints are saved every two steps


@dataclass(frozen=True, kw_only=True)
class Kind:
    """The command and the flags for one kind of run. Paths are relative to the run's folder."""

    command: str
    flags: dict[str, Any]
    user_files: tuple[str, ...] = ()
    deterministic: bool = True


COMMON = {
    "ds.param_dtype": "fp32",
    "run.dir": "run",
    "ckpt.path": "checkpoints",
    "ckpt.output_dir": "trained",
    "ckpt.save_steps": 2,
    "ckpt.max_num": 1,
}
OFFLINE = {
    **COMMON,
    "model.model_name_or_path": "model",
    "data.max_len": 32,
    "train.batch_size": 16,
    "train.micro_batch_size": 8,
    "train.max_epochs": 2,
    "adam.lr": 3e-3,
}
RL = {
    **COMMON,
    "actor.model_name_or_path": "model",
    "data.prompt_dataset": "prompts.jsonl",
    "data.label_key": "label",
    "data.max_len": 40,
    "rollout.max_new_tokens": 8,
    "rollout.batch_size": 4,
    "rollout.n_samples_per_prompt": 2,
    "rollout.micro_batch_size": 4,
    "train.batch_size": 8,
    "train.micro_batch_size": 4,
    "train.colocate_actor_ref": True,
    "actor.adam.lr": 1e-3,
}
KINDS = {
    "sft": Kind(
        command="train_sft",
        flags={
            **OFFLINE,
            "data.dataset": "rows.jsonl",
            "data.input_key": "input",
            "data.output_key": "output",
            "data.input_template": "{}",
            "train.enable_ema": True,
            "train.ema_beta": 0.5,
        },
    ),
    "lora": Kind(
        command="train_dpo",
        flags={
            **OFFLINE,
            "data.dataset": "pairs.jsonl",
            "data.prompt_key": "prompt",
            "data.input_template": "say {}=",
            "ds.lora.rank": 4,
            "plugin": ["exponential.py"],
            "model.loss_type": "exponential",
        },
        user_files=("exponential.py",),
    ),
    "ppo": Kind(
        command="train_ppo_ray",
        flags={
            **RL,
            "reward.model_name_or_path": "reward_model",
            "reward.remote_url": "share_of_a.py",
            "train.colocate_critic_reward": True,
            "critic.adam.lr": 1e-3,
        },
        user_files=("share_of_a.py",),
    ),
    "ppo_async": Kind(
        command="train_ppo_ray",
        flags={
            **RL,
            "train.agent_func_path": "two_turns.py",
            "train.async_enable": True,
            "train.partial_rollout_enable": True,
            "algo.advantage.estimator": "group_norm",
        },
        user_files=("two_turns.py",),
        deterministic=False,
    ),
}


def prepare(kind: Kind, folder: Path) -> None:
    """Write a run's models, data, user files and configuration file to `folder`."""
    folder.mkdir()
    sizes = {**HEADS, "num_hidden_layers": 1, "vocab_size": len(character_tokenizer())}
    save_tiny_model(folder / "model", **sizes)
    if "reward.model_name_or_path" in kind.flags:
        save_reward_model(folder / "reward_model", base=folder / "model")
    write_rows(folder / "rows.jsonl", copying_rows(48, seed=1))
    write_rows(folder / "pairs.jsonl", preference_rows(48, seed=1))
    prompts = [
        {"input": row["input"] + "=", "label": row["output"]} for row in copying_rows(24, seed=2)
    ]
    write_rows(folder / "prompts.jsonl", prompts)
    for name in kind.user_files:
        shutil.copy(USER_FILES / name, folder / name)
    (folder / CONFIG).write_text(yaml.safe_dump(kind.flags), encoding="utf-8")


def start(kind: Kind, folder: Path, **flags: bool) -> subprocess.Popen[str]:
    """Start the command in `folder` with its configuration file."""
    variables = {"PYTHONPATH": str(ROOT), "HF_DATASETS_CACHE": str(folder / "cache")}
    return launch(kind.command, {"config": CONFIG, **flags}, folder=folder, variables=variables)


def freeze(name: str) -> None:
    """Complete one run of a kind, kill a second run, and archive the killed run's files."""
    kind = KINDS[name]
    with TemporaryDirectory() as temporary:
        whole, killed = Path(temporary) / "whole", Path(temporary) / name
        prepare(kind, whole)
        done = finish(start(kind, whole))
        assert done.status == 0, done.errors
        prepare(kind, killed)
        kill_when(start(kind, killed), lambda: steps_logged(killed / "run") >= KILL_AFTER)
        assert not (killed / "trained").exists(), "the run finished before it was killed"
        shutil.rmtree(killed / "cache", ignore_errors=True)
        shutil.rmtree(killed / "run/logs", ignore_errors=True)
        FROZEN.mkdir(exist_ok=True)
        with tarfile.open(FROZEN / f"{name}.tar.xz", "w:xz") as archive:
            archive.add(killed, arcname=name)
        content = {"commit": commit(), "machine": machine(), "numbers": numbers(whole / "run")}
        (FROZEN / f"{name}.json").write_text(json.dumps(content, indent=0) + "\n", encoding="utf-8")


def main() -> None:
    """Freeze each kind of run that has no archive yet."""
    for name in KINDS:
        if not (FROZEN / f"{name}.tar.xz").exists():
            freeze(name)
            print(name, "frozen", flush=True)


if __name__ == "__main__":
    main()
