"""Measures this project and TRL side by side, in alternating rounds: CPU seconds of all processes per step, and ratios.

    make bench
    python -m benchmarks.run --rounds 1 --only grpo-equal-fp32 --peer .venv/peer

`--peer`: a folder with TRL, which `make bench` installs; without it this project is measured alone.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks import workload
from benchmarks.processes import Course, follow

ROOT = Path(__file__).parent.parent
WARM_UP, MEASURED = 2, 5  # steps
ALONE = {"RAY_ADDRESS": "local"}  # processes of another Ray would not be counted
CAVEATS = (
    "TRL's steps have no weight sync, which vLLM on a CPU cannot load as TRL sends it. TRL has one thread, our trainer as "
    "many as there are cores; its bfloat16 is autocast over float32 weights."
)


@dataclass(frozen=True, kw_only=True)
class Grpo:
    """GRPO of a model of 3M parameters, one optimizer step for each batch of 256 samples, without a KL."""

    lengths: str  # equal: every response has 64 tokens; tail: mean 64, cut at 256
    dtype: str

    @property
    def name(self) -> str:
        return f"grpo-{self.lengths}-{self.dtype}"

    def ours(self, data: Path, folder: Path) -> Course:
        new_tokens = workload.NEW_TOKENS[self.lengths]
        flags = {
            "actor.model_name_or_path": data / f"3M-{self.lengths}",
            "data.prompt_dataset": data / "prompts.jsonl",
            "data.input_key": "input",
            "data.max_samples": (WARM_UP + MEASURED) * workload.STEP_PROMPTS,
            "data.max_len": workload.LONGEST_PROMPT + new_tokens,
            "reward.remote_url": ROOT / "benchmarks/reward.py",
            "rollout.max_new_tokens": new_tokens,
            "rollout.batch_size": workload.STEP_PROMPTS,
            "rollout.n_samples_per_prompt": workload.SAMPLES,
            "rollout.micro_batch_size": workload.MICRO_BATCH,
            "train.batch_size": workload.STEP_PROMPTS * workload.SAMPLES,
            "train.micro_batch_size": workload.MICRO_BATCH,
            "algo.advantage.estimator": "group_norm",
            "algo.kl.init_coef": 0,
            "ds.param_dtype": self.dtype,
            "run.dir": folder,
            "ckpt.output_dir": folder / "model",
            "ckpt.path": folder / "checkpoints",
        }
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        command = [sys.executable, "-m", "openrlhf.cli.train_ppo_ray", *words]
        return follow(command, folder / "metrics.jsonl", environment=ALONE, log=folder.with_suffix(".log"))

    def trl(self, data: Path, folder: Path, peer: Path) -> Course:
        rows = folder.with_suffix(".jsonl")
        settings = [data / f"3M-{self.lengths}", data / "prompts.jsonl", rows, self.dtype]
        numbers = [workload.NEW_TOKENS[self.lengths], WARM_UP + MEASURED]
        command = [sys.executable, "-m", "benchmarks.trl_grpo", *map(str, settings + numbers)]
        environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(peer)]), "OMP_NUM_THREADS": "1"}
        return follow(command, rows, environment=environment, log=folder.with_suffix(".log"))


CASES = [Grpo(lengths=lengths, dtype=dtype) for lengths in ("equal", "tail") for dtype in ("fp32", "bf16")]


def per_step(course: Course) -> float:
    """Median CPU seconds of the measured steps. Raises ValueError if the run had other steps."""
    if len(course.marks) != WARM_UP + MEASURED:
        raise ValueError(f"{len(course.marks)} steps were seen, and {WARM_UP + MEASURED} were asked for")
    return median(course.steps()[-MEASURED:])


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line per run, and at last a line per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=[case.name for case in CASES], default=[])
    parser.add_argument("--peer", type=Path)
    parser.add_argument("--folder", type=Path, help="default: a new temporary folder")
    chosen = parser.parse_args(argv)
    folder = chosen.folder or Path(tempfile.mkdtemp(prefix="bench-"))
    if not (data := folder / "data").exists():
        workload.write(data)
    seen: dict[str, dict[str, list[float]]] = {}
    for turn in range(chosen.rounds):
        for case in CASES:
            if chosen.only and case.name not in chosen.only:
                continue
            for side in ("ours", "trl") if chosen.peer else ("ours",):
                load = os.getloadavg()[0]
                place = folder / f"{case.name}-{side}-{turn}-{os.getpid()}"
                course = case.ours(data, place) if side == "ours" else case.trl(data, place, chosen.peer)
                seen.setdefault(case.name, {}).setdefault(side, []).append(per_step(course))
                line = {"case": case.name, "side": side, "CPU s per step": per_step(course)}
                print(json.dumps(line | {"GB": course.peak_bytes / 1e9, "load before": load}), flush=True)
    print(f"Runs: {folder}\n{CAVEATS}" if chosen.peer else f"Runs: {folder}")
    for name, sides in seen.items():
        medians = {side: median(runs) for side, runs in sides.items()}
        ratio = f", ours / TRL {medians['ours'] / medians['trl']:.2f}" if "trl" in medians else ""
        print(
            f"{name}: {', '.join(f'{side} {seconds:.2f}' for side, seconds in medians.items())} CPU s per step{ratio}"
        )


if __name__ == "__main__":
    main()
