"""Runs one comparison from the OpenRLHF paper: this project and a peer, one after the other.

    python -m benchmarks.paper.run gsm8k                 # GRPO on GSM8K, with TRL
    python -m benchmarks.paper.run ppo --size one-gpu    # PPO on 1,024 prompts, with DeepSpeed-Chat
    python -m benchmarks.paper.run dapo --length 4096    # DAPO, with verl

The command writes the data, installs the peer if needed, and runs both sides in alternating rounds
on the same machine. The command prints seconds per step, tokens per second and the ratio, and
writes them, together with the environment, to a JSON file in the comparison's folder. README.md in
this folder describes what is the same on both sides.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.paper.measure import (
    Mark,
    Summary,
    deepspeed_chat_marks,
    machine,
    our_marks,
    run,
    summarize,
    trl_marks,
    verl_marks,
    versions,
)

ROOT = Path(__file__).parents[2]
HERE = Path("benchmarks/paper")
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": "local", "PYTHONUNBUFFERED": "1"}
LENGTHS = (1024, 2048, 4096, 8192)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A comparison on one machine."""

    name: str
    size: str
    model: str
    gpus: int
    prompts: int  # prompts per step
    samples: int  # samples per prompt
    length: int  # maximum tokens per response
    warm_up: int  # number of steps that are not measured
    steps: int  # number of steps that are measured

    @property
    def all_steps(self) -> int:
        return self.warm_up + self.steps

    @property
    def step_samples(self) -> int:
        return self.prompts * self.samples

    def data(self, folder: Path) -> Path:
        """Return the folder with the prompts.

        For PPO, the folder's name includes the number of prompts.
        """
        if self.name == "ppo":
            return folder / f"data-{self.prompts * self.all_steps}"
        return folder / "data"


SIZES: dict[tuple[str, str], dict[str, Any]] = {
    ("gsm8k", "paper"): {"model": "Qwen/Qwen2.5-1.5B-Instruct", "gpus": 8},
    ("gsm8k", "one-gpu"): {"model": "Qwen/Qwen2.5-0.5B-Instruct", "gpus": 1},
    ("ppo", "paper"): {"model": "meta-llama/Llama-2-7b-hf", "gpus": 8},
    ("ppo", "one-gpu"): {"model": "princeton-nlp/Sheared-LLaMA-1.3B", "gpus": 1},
    ("dapo", "paper"): {"model": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "gpus": 8},
    ("dapo", "one-gpu"): {"model": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "gpus": 1},
}
SHAPES: dict[str, dict[str, int]] = {
    "gsm8k": {"prompts": 128, "samples": 8, "length": 512, "warm_up": 3, "steps": 10},
    "ppo": {"prompts": 1024, "samples": 1, "length": 256, "warm_up": 1, "steps": 3},
    "dapo": {"prompts": 128, "samples": 8, "length": 1024, "warm_up": 10, "steps": 10},
}
PEERS = {"gsm8k": "TRL", "ppo": "DeepSpeed-Chat", "dapo": "verl"}
# Times of OpenRLHF and of the peer in section 4.1 of the paper
PUBLISHED = {
    "gsm8k": "one epoch of GSM8K: 1,657 s and 5,189 s",
    "ppo": "1,024 prompts: 236.8 s and 855.09 s",
    "dapo": "a step: Table 1",
}


def our_flags(case: Case, folder: Path, place: Path) -> dict[str, object]:
    """Return the flags to add to ours.yaml for this machine, the data and the length."""
    flags: dict[str, object] = {
        "actor.model_name_or_path": case.model,
        "data.prompt_dataset": case.data(folder) / "prompts.jsonl",
        "data.max_samples": case.prompts * case.all_steps,
        "actor.num_gpus_per_node": case.gpus,
        "vllm.num_engines": case.gpus,
        "run.dir": place,
        "ckpt.output_dir": place / "model",
        "ckpt.path": place / "checkpoints",
    }
    if case.name == "ppo":
        reward = folder / "models/reward"
        flags |= {"reward.model_name_or_path": reward, "critic.model_name_or_path": reward}
        for role in ("critic", "ref", "reward"):
            flags[f"{role}.num_gpus_per_node"] = case.gpus
    if case.name == "dapo":
        flags |= {
            "data.max_samples": 10**8,  # group filtering may need any number of prompts
            "data.max_len": 1024 + case.length,
            "rollout.max_new_tokens": case.length,
            "rollout.batch_size": case.prompts,
            "reward.overlong_buffer_len": case.length // 4,
        }
    return flags


def our_command(case: Case, folder: Path, place: Path) -> list[str]:
    """Return this project's command line."""
    words = [sys.executable, "-m", "openrlhf.cli.train_ppo_ray"]
    words += ["--config", str(HERE / case.name / "ours.yaml")]
    for name, value in our_flags(case, folder, place).items():
        words += [f"--{name}", str(value)]
    return words


def peer_command(case: Case, folder: Path, place: Path, peer: Path) -> list[str]:
    """Return the peer's command line; the peer's environment is in `peer`."""
    match case.name:
        case "gsm8k":
            words: list[object] = [peer / "bin/accelerate", "launch"]
            words += ["--config_file", HERE / "gsm8k/zero2.yaml"]
            words += ["--num_processes", case.gpus, "--module", "benchmarks.paper.gsm8k.trl_grpo"]
            words += ["--model", case.model, "--prompts", case.data(folder) / "prompts.jsonl"]
            words += ["--output", place, "--steps", case.all_steps, "--gpus", case.gpus]
        case "ppo":
            words = ["bash", HERE / "ppo/deepspeed_chat.sh", peer, case.model]
            words += [folder / "models/deepspeed_chat", case.data(folder) / "deepspeed_chat"]
            words += [place, case.gpus]
        case _:
            words = ["bash", HERE / "dapo/verl.sh", peer, case.model]
            words += [case.data(folder) / "prompts.parquet", place, case.gpus, case.all_steps]
            words += [case.length, case.prompts]
    return [str(word) for word in words]


def peer_reader(case: Case) -> Callable[[Path], list[Mark]]:
    """Return the function that reads the peer's log."""
    readers = {"gsm8k": trl_marks, "ppo": deepspeed_chat_marks, "dapo": verl_marks}
    return partial(readers[case.name], samples=case.step_samples)


# ---- preparation


def prepare(case: Case, folder: Path, peer: Path | None, source: Path | None) -> None:
    """Write data and models once, and install the peer if its folder does not exist."""
    data = case.data(folder)
    if not (data / "prompts.jsonl").exists():
        words: list[object] = [sys.executable, "-m", "benchmarks.paper.data", case.name]
        words += [data, "--tokenizer", case.model]
        if case.name == "ppo":
            words += ["--prompts", case.prompts * case.all_steps]
        if source:
            words += ["--source", source]
        call(words)
    if case.name == "ppo" and not (folder / "models/deepspeed_chat/pytorch_model.bin").exists():
        call([sys.executable, "-m", "benchmarks.paper.ppo.models", case.model, folder / "models"])
    if peer and not (peer / "bin/python").exists():
        call(["bash", HERE / case.name / "install.sh", peer])


def call(words: Sequence[object]) -> None:
    subprocess.run([str(word) for word in words], cwd=ROOT, check=True)


# ---- the comparison


def has_steps(metrics: Path, steps: int) -> bool:
    """Return whether a run of this project has logged `steps` steps.

    With group filtering, the number of prompts does not determine the number of steps.
    """
    return metrics.exists() and len(our_marks(metrics)) >= steps


def measure_ours(case: Case, folder: Path, place: Path, *, timeout_s: float) -> Summary:
    """Run this project, with its run folder at `place`."""
    run(
        our_command(case, folder, place),
        place.with_suffix(".log"),
        environment=ENVIRONMENT,
        timeout_s=timeout_s,
        is_enough=partial(has_steps, place / "metrics.jsonl", case.all_steps),
    )
    return summarize(our_marks(place / "metrics.jsonl"), case.warm_up)


def measure_peer(case: Case, folder: Path, place: Path, peer: Path, *, timeout_s: float) -> Summary:
    """Run the peer, with its output at `place`."""
    log = place.with_suffix(".log")
    run(peer_command(case, folder, place, peer), log, environment=ENVIRONMENT, timeout_s=timeout_s)
    return summarize(peer_reader(case)(log), case.warm_up)


def report(case: Case, seen: dict[str, list[Summary]]) -> str:
    """Return a comparison's table, including the ratio of the mean seconds per step."""
    lines = [
        f"{case.name}, {case.model}, {case.gpus} GPU(s), {case.steps} steps after {case.warm_up}"
    ]
    means = {}
    for side, runs in seen.items():
        means[side] = fmean(each.mean_s for each in runs)
        per_second = [each.tokens_per_second for each in runs if each.tokens_per_second]
        tokens = f"{fmean(per_second):,.0f} tokens/s" if per_second else "tokens not reported"
        lines.append(f"{side:>15}: {means[side]:.1f} s per step, {tokens}")
    if len(means) == 2:
        ours, peer = means.values()
        lines.append(f"{'ratio':>15}: {peer / ours:.2f} (the paper: {PUBLISHED[case.name]})")
    return "\n".join(lines)


def case_of(chosen: argparse.Namespace) -> Case:
    """Return the case that the command line selects."""
    fields = SHAPES[chosen.name] | SIZES[chosen.name, chosen.size]
    if chosen.name == "dapo" and chosen.size == "one-gpu":
        fields["prompts"] = 32
    given = {
        "model": chosen.model,
        "gpus": chosen.gpus,
        "length": chosen.length,
        "steps": chosen.steps,
        "warm_up": chosen.warm_up,
    }
    fields |= {name: value for name, value in given.items() if value is not None}
    return Case(name=chosen.name, size=chosen.size, **fields)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=list(SHAPES))
    parser.add_argument("--size", choices=["paper", "one-gpu"], default="paper")
    parser.add_argument("--model", help="another model of the same architecture")
    parser.add_argument("--gpus", type=int)
    parser.add_argument("--length", type=int, choices=LENGTHS, help="dapo: tokens per response")
    parser.add_argument("--steps", type=int, help="measured steps")
    parser.add_argument("--warm-up", type=int, help="steps before the measurement starts")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each side")
    parser.add_argument("--folder", type=Path, help="default: runs/paper/NAME-MODEL")
    parser.add_argument(
        "--peer", type=Path, help="the peer's environment; default: runs/paper/peers/NAME"
    )
    parser.add_argument("--only-ours", action="store_true", help="do not run the peer")
    parser.add_argument("--source", type=Path, help="the dataset as a local file")
    parser.add_argument("--timeout", type=float, default=7200, help="seconds for one run")
    parser.add_argument("--show", action="store_true", help="print both commands and exit")
    chosen = parser.parse_args(argv)
    if chosen.length and chosen.name != "dapo":
        parser.error("--length applies only to dapo")
    return chosen


def main(argv: Sequence[str] | None = None) -> None:
    """Run a comparison."""
    chosen = parse(argv)
    case = case_of(chosen)
    folder = chosen.folder or Path("runs/paper") / f"{case.name}-{Path(case.model).name}"
    peer = None if chosen.only_ours else chosen.peer or Path("runs/paper/peers") / case.name
    if chosen.show:
        print(" ".join(our_command(case, folder, folder / "ours-0")))
        if peer:
            print(" ".join(peer_command(case, folder, folder / "peer-0", peer)))
        return
    prepare(case, folder, peer, chosen.source)
    found = {"ours": versions(sys.executable)}
    if peer:
        found[PEERS[case.name]] = versions(str(peer / "bin/python"))
    result = {"case": asdict(case), "machine": machine(), "versions": found}
    started = time.strftime("%m%d-%H%M%S")
    seen: dict[str, list[Summary]] = {}
    for turn in range(chosen.rounds):
        place = folder / f"{started}-{turn}-ours"
        ours = measure_ours(case, folder, place, timeout_s=chosen.timeout)
        seen.setdefault("ours", []).append(ours)
        if peer:
            place = folder / f"{started}-{turn}-peer"
            theirs = measure_peer(case, folder, place, peer, timeout_s=chosen.timeout)
            seen.setdefault(PEERS[case.name], []).append(theirs)
        runs = {side: [asdict(each) for each in summaries] for side, summaries in seen.items()}
        text = report(case, seen)
        (folder / f"{started}.json").write_text(
            json.dumps(result | {"runs": runs, "report": text}, indent=1) + "\n", encoding="utf-8"
        )
        print(text, flush=True)


if __name__ == "__main__":
    main()
