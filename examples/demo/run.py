"""The demo of `make demo`: a tiny model learns from rewards, with the commands used on clusters.

task and untrained model → train_sft → train_rm → train_ppo_ray: PPO against the reward model
                                     → train_ppo_ray: GRPO with a rule reward
                                     → table and report.html
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from openrlhf.observability.display import Display
from openrlhf.observability.report import write_report
from openrlhf.observability.run_folder import read_lines

Flags = list[str | Path]

HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class StageResult:
    """The result of one stage of the demo."""

    name: str
    folder: Path
    seconds: float

    def last(self, metric: str) -> float | None:
        """Return the last logged value of a metric."""
        found = [row[metric] for row in read_lines(self.folder / "metrics.jsonl") if metric in row]
        return found[-1] if found else None

    def first(self, metric: str) -> float | None:
        """Return the first logged value of a metric."""
        rows = read_lines(self.folder / "metrics.jsonl")
        return next((row[metric] for row in rows if metric in row), None)


def stage_flags(out: Path, seed: int) -> Flags:
    """Return the flags that all stages share: seed, precision and output folders."""
    return [
        *("--train.seed", str(seed), "--ds.param_dtype", "fp32", "--ds.packing_samples"),
        *("--run.dir", out, "--ckpt.output_dir", out / "model", "--ckpt.path", out / "checkpoints"),
    ]


def sft_flags(task: Path, out: Path, seed: int) -> Flags:
    """Return flags for learning the answer format from 5,760 worked examples."""
    return [
        *("--model.model_name_or_path", task / "model"),
        *("--data.dataset", task / "train.jsonl", "--data.max_samples", "5760"),
        *(
            "--data.input_key",
            "input",
            "--data.output_key",
            "output",
            "--data.input_template",
            "{}",
        ),
        *("--data.max_len", "32", "--train.max_epochs", "1"),
        *("--train.batch_size", "64", "--train.micro_batch_size", "64"),
        *("--adam.lr", "1e-3", "--lr_warmup_ratio", "0.1"),
        *stage_flags(out, seed),
    ]


def rm_flags(task: Path, model: Path, out: Path, seed: int) -> Flags:
    """Return flags for training the SFT model into a reward model on 15,000 preference pairs."""
    return [
        *("--model.model_name_or_path", model, "--data.dataset", task / "pairs.jsonl"),
        *("--eval.dataset", task / "held_out_pairs.jsonl"),
        *("--data.prompt_key", "prompt", "--data.max_len", "32", "--train.max_epochs", "2"),
        *("--train.batch_size", "64", "--train.micro_batch_size", "64"),
        *("--adam.lr", "1e-3", "--lr_warmup_ratio", "0.1"),
        *stage_flags(out, seed),
    ]


def rl_flags(task: Path, model: Path, out: Path, seed: int) -> Flags:
    """Return the flags that PPO and GRPO share.

    The flags set 256 samples per step and an evaluation on 400 held-out problems × 4 samples.
    """
    return [
        *("--actor.model_name_or_path", model, "--data.prompt_dataset", task / "prompts.jsonl"),
        *("--data.input_key", "input", "--data.label_key", "output", "--data.max_len", "32"),
        *("--reward.remote_url", HERE / "reward.py", "--rollout.max_new_tokens", "8"),
        *(
            "--rollout.micro_batch_size",
            "256",
            "--train.batch_size",
            "256",
            "--train.micro_batch_size",
            "256",
        ),
        *(
            "--train.colocate_actor_ref",
            "--actor.num_gpus_per_node",
            "1",
            "--ref.num_gpus_per_node",
            "1",
        ),
        *(
            "--actor.lr_warmup_ratio",
            "0.1",
            "--eval.dataset",
            task / "held_out.jsonl",
            "--eval.at_start",
        ),
        *("--eval.n_samples_per_prompt", "4", "--eval.temperature", "1"),
        *stage_flags(out, seed),
    ]


def ppo_flags(reward_model: Path) -> Flags:
    """Return flags for 64 PPO steps of 128 problems × 2 samples.

    The reward comes from the reward model. The rule reward has weight 0, so it is only logged.
    """
    return [
        *(
            "--data.max_samples",
            "8192",
            "--rollout.batch_size",
            "128",
            "--rollout.n_samples_per_prompt",
            "2",
        ),
        *(
            "--reward.model_name_or_path",
            reward_model,
            "--reward.normalize_enable",
            "--reward.weights",
            "1",
            "0",
        ),
        *(
            "--algo.advantage.estimator",
            "gae",
            "--algo.advantage.lambd",
            "0.95",
            "--algo.kl.init_coef",
            "0.05",
        ),
        *("--actor.adam.lr", "2e-4"),
        *(
            "--critic.adam.lr",
            "1e-3",
            "--critic.freezing_steps",
            "6",
            "--train.colocate_critic_reward",
        ),
        *(
            "--critic.num_gpus_per_node",
            "1",
            "--reward.num_gpus_per_node",
            "1",
            "--eval.steps",
            "16",
        ),
    ]


def grpo_flags() -> Flags:
    """Return flags for 120 GRPO steps of 32 problems × 8 samples.

    The reward is 1 for the correct answer, else 0.
    """
    return [
        *(
            "--data.max_samples",
            "3840",
            "--rollout.batch_size",
            "32",
            "--rollout.n_samples_per_prompt",
            "8",
        ),
        *("--algo.advantage.estimator", "group_norm", "--actor.adam.lr", "3e-4"),
        *(
            "--algo.kl.init_coef",
            "1e-3",
            "--algo.kl.use_loss",
            "--algo.kl.estimator",
            "k3",
            "--eval.steps",
            "40",
        ),
    ]


def run_stage(name: str, command: str, flags: Flags, folder: Path, display: Display) -> StageResult:
    """Run one of the package's commands as a user would."""
    line = [sys.executable, "-m", f"openrlhf.cli.{command}", *map(str, flags)]
    display.note(f"\n{name}: python -m openrlhf.cli.{command} --run.dir {folder} …")
    start = time.monotonic()
    finished = subprocess.run(line, check=False)
    if finished.returncode:
        raise SystemExit(f"{name} exited with status {finished.returncode}; see {folder / 'logs'}")
    return StageResult(name=name, folder=folder, seconds=time.monotonic() - start)


def main() -> None:
    """Create the task, run the stages, and print the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--out", type=Path, default=None, help="folder (default runs/demo-seed<seed>)"
    )
    options = parser.parse_args()
    out: Path = options.out or Path("runs") / f"demo-seed{options.seed}"
    display, start = Display(), time.monotonic()
    display.note("The task: sort five digits. The correct answer to `sort 52918=` is `12589`.")
    subprocess.run(
        [sys.executable, str(HERE / "task.py"), str(out / "task"), str(options.seed)], check=True
    )
    stages = run_stages(out, options.seed, display)
    report = conclude(stages, out, title=f"OpenRLHF demo: sorting digits, seed {options.seed}")
    display.note(f"Total: {time.monotonic() - start:.0f} s. Run folder: {out}   report: {report}")


def run_stages(out: Path, seed: int, display: Display) -> dict[str, StageResult]:
    """Run SFT, reward model training, PPO and GRPO, each in its own folder."""
    task, sft, rm = out / "task", out / "sft", out / "rm"
    policy = sft / "model"
    commands = {
        "SFT": ("train_sft", sft, sft_flags(task, sft, seed)),
        "RM": ("train_rm", rm, rm_flags(task, policy, rm, seed)),
        "PPO": (
            "train_ppo_ray",
            out / "ppo",
            rl_flags(task, policy, out / "ppo", seed) + ppo_flags(rm / "model"),
        ),
        "GRPO": (
            "train_ppo_ray",
            out / "grpo",
            rl_flags(task, policy, out / "grpo", seed) + grpo_flags(),
        ),
    }
    return {
        name: run_stage(name, command, flags, folder, display)
        for name, (command, folder, flags) in commands.items()
    }


def conclude(stages: dict[str, StageResult], out: Path, *, title: str) -> Path:
    """Print a table of the results, and write the report with this table above the curves."""
    columns, rows = summary(stages)
    table = Table(*columns, title="What the model learned")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    curves = {name: stage.folder for name, stage in stages.items()}
    write_report(out / "report.html", curves, title=title, tables=[[columns, *rows]])
    return out / "report.html"


def summary(stages: dict[str, StageResult]) -> tuple[list[str], list[list[str]]]:
    """Return held-out results after each stage: 400 problems × 4 samples at temperature 1.

    The reward model is evaluated on its held-out pairs. The SFT row shows the score before PPO.
    """
    passed, score, kl = "eval/eval_sort_pass1", "eval/eval_sort_reward_mean", "train/kl"
    ppo, grpo = stages["PPO"], stages["GRPO"]
    columns = [
        "stage",
        "held-out pass@1",
        "reward model's score",
        "pairs ranked correctly",
        "KL (nats/token)",
        "seconds",
    ]
    numbers = {
        "SFT": (grpo.first(passed), ppo.first(score), None, None),
        "RM": (None, None, stages["RM"].last("eval/acc_mean"), None),
        "PPO": (ppo.last(passed), ppo.last(score), None, ppo.last(kl)),
        "GRPO": (grpo.last(passed), None, None, grpo.last(kl)),
    }
    return columns, [
        [name, *map(_number, row), f"{stages[name].seconds:.0f}"] for name, row in numbers.items()
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    main()
