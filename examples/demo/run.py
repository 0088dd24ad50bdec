"""`make demo`: from nothing to a tiny model that learned from rewards, through the same commands a cluster user calls.

task and untrained model  →  train_sft  →  train_ppo_ray (GRPO with a rule reward)  →  table and report.html
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from openrlhf.observability.display import Display
from openrlhf.observability.report import Stage, write_report
from openrlhf.observability.run_folder import read_lines

HERE = Path(__file__).parent
PRECISION = ["--ds.param_dtype", "fp32", "--ds.packing_samples"]


@dataclass(frozen=True, kw_only=True)
class StageResult:
    """What a stage of the demo came to."""

    name: str
    folder: Path
    seconds: float

    def last(self, metric: str) -> float | None:
        """The newest value of a logged number."""
        found = [row[metric] for row in read_lines(self.folder / "metrics.jsonl") if metric in row]
        return found[-1] if found else None

    def first(self, metric: str) -> float | None:
        """The oldest value of a logged number."""
        rows = read_lines(self.folder / "metrics.jsonl")
        return next((row[metric] for row in rows if metric in row), None)


def sft_flags(task: Path, out: Path, seed: int) -> list[str]:
    """Learn the form of an answer from 5,760 worked examples."""
    return [
        *("--model.model_name_or_path", task / "model"),
        *("--data.dataset", task / "train.jsonl", "--data.max_samples", "5760"),
        *("--data.input_key", "input", "--data.output_key", "output", "--data.input_template", "{}"),
        *("--data.max_len", "32", "--train.max_epochs", "1"),
        *("--train.batch_size", "64", "--train.micro_batch_size", "64"),
        *("--adam.lr", "1e-3", "--lr_warmup_ratio", "0.1"),
        *("--train.seed", str(seed), *PRECISION),
        *("--run.dir", out, "--ckpt.output_dir", out / "model", "--ckpt.path", out / "checkpoints"),
    ]


def grpo_flags(task: Path, model: Path, out: Path, seed: int) -> list[str]:
    """120 steps of 32 problems × 8 samples; the reward is 1 for the right answer, else 0."""
    return [
        *("--actor.model_name_or_path", model),
        *("--data.prompt_dataset", task / "prompts.jsonl", "--data.max_samples", "3840"),
        *("--data.input_key", "input", "--data.label_key", "output", "--data.max_len", "32"),
        *("--reward.remote_url", HERE / "reward.py", "--rollout.max_new_tokens", "8"),
        *("--rollout.batch_size", "32", "--rollout.n_samples_per_prompt", "8"),
        *("--rollout.micro_batch_size", "256"),
        *("--train.batch_size", "256", "--train.micro_batch_size", "256"),
        *("--algo.advantage.estimator", "group_norm", "--train.colocate_actor_ref"),
        *("--algo.kl.init_coef", "1e-3", "--algo.kl.use_loss", "--algo.kl.estimator", "k3"),
        *("--actor.adam.lr", "3e-4", "--actor.lr_warmup_ratio", "0.1"),
        *("--eval.dataset", task / "held_out.jsonl", "--eval.at_start", "--eval.steps", "40"),
        *("--eval.n_samples_per_prompt", "4", "--eval.temperature", "1"),
        *("--train.seed", str(seed), *PRECISION),
        *("--run.dir", out, "--ckpt.output_dir", out / "model", "--ckpt.path", out / "checkpoints"),
    ]


def run_stage(name: str, command: str, flags: list[str], folder: Path, display: Display) -> StageResult:
    """Run a command of the package as a user would."""
    line = [sys.executable, "-m", f"openrlhf.cli.{command}", *map(str, flags)]
    display.note(f"\n{name}: python -m openrlhf.cli.{command} --run.dir {folder} …")
    start = time.monotonic()
    finished = subprocess.run(line, check=False)
    if finished.returncode:
        raise SystemExit(f"{name} ended with status {finished.returncode}; see {folder / 'logs'}")
    return StageResult(name=name, folder=folder, seconds=time.monotonic() - start)


def main() -> None:
    """Make the task, run the stages, show what was learned."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=None, help="folder (default runs/demo-seed<seed>)")
    options = parser.parse_args()
    out: Path = options.out or Path("runs") / f"demo-seed{options.seed}"
    display, start = Display(), time.monotonic()
    display.note("The task: sort five digits. `sort 52918=` is to be answered `12589`.")
    subprocess.run([sys.executable, str(HERE / "task.py"), str(out / "task"), str(options.seed)], check=True)
    sft = run_stage("SFT", "train_sft", sft_flags(out / "task", out / "sft", options.seed), out / "sft", display)
    flags = grpo_flags(out / "task", out / "sft" / "model", out / "grpo", options.seed)
    grpo = run_stage("GRPO", "train_ppo_ray", flags, out / "grpo", display)
    columns, rows = summary(sft, grpo)
    display.table("What the model learned", columns, rows)
    report = out / "report.html"
    stages = [Stage(name=stage.name, folder=stage.folder) for stage in (sft, grpo)]
    title = f"OpenRLHF demo: sorting digits, seed {options.seed}"
    write_report(report, stages, title=title, summary_rows=[columns, *rows])
    display.note(f"{time.monotonic() - start:.0f} s in all. Run folder: {out}   report: {report}")


def summary(sft: StageResult, grpo: StageResult) -> tuple[list[str], list[list[str]]]:
    """Held-out pass@1 (400 problems × 4 samples, temperature 1) after each stage."""
    pass_at_1 = "eval/eval_sort_pass1"
    columns = ["stage", "held-out pass@1", "reward", "KL (nats/token)", "seconds"]
    return columns, [
        ["SFT", _number(grpo.first(pass_at_1)), "", "", f"{sft.seconds:.0f}"],
        [
            "GRPO",
            _number(grpo.last(pass_at_1)),
            _number(grpo.last("train/reward")),
            _number(grpo.last("train/kl")),
            f"{grpo.seconds:.0f}",
        ],
    ]


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    main()
