"""Tests that a chat model with 135 million parameters learns with every method.

Each run uses the files in examples/real_model with two seeds and takes 10 to 40 minutes on two
cores. To start a single run: `pytest -m verify tests/verify/test_real_model.py -k "grpo_lora and
seed1"`.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

import pytest

from openrlhf.observability.run_folder import read_lines
from openrlhf.units import GIB
from tests.e2e.commands import column
from tests.ranks import ROOT
from tests.verify.real_model import Answered, PeakMemory, RealRun, record, write_page
from tests.verify.results import versions

pytestmark = pytest.mark.verify
EXAMPLE = ROOT / "examples" / "real_model"
SEEDS = [1, 2]
CAPITAL = "What is the capital of France?"
FLOAT32 = ("--ds.param_dtype", "fp32")


@dataclass(frozen=True, kw_only=True)
class Task:
    """A run's command, configuration file and measured value, and the metric for its curve."""

    command: str
    file: str
    measured: str
    curve: str  # name of a metric that is logged at each step
    metric: str = ""  # name of the measured metric, unless `eval` measures it
    flags: str = ""  # flags in addition to those in the file
    better: str = "higher"
    first: float | None = None  # value before training; None if it is measured
    at_least: float | None = None  # minimum after training; None: two standard errors better

    def line(self) -> str:
        """Return the command line as a user types it."""
        return " ".join(
            [
                "openrlhf",
                self.command,
                "--config",
                f"examples/real_model/{self.file}",
                *self.flags.split(),
            ]
        )


SUMS = "sums solved: pass@1 at temperature 1"
ASYNC = "--train.async_enable --algo.advantage.is_correction_enable"
LORA = "--ds.lora.rank 16 --actor.adam.lr 2e-4"
RUNS = {
    "grpo": Task(command="ppo", file="grpo.yaml", measured=SUMS, curve="train/score"),
    "grpo_async": Task(
        command="ppo", file="grpo.yaml", measured=SUMS, curve="train/score", flags=ASYNC
    ),
    "grpo_lora": Task(
        command="ppo", file="grpo.yaml", measured=SUMS, curve="train/score", flags=LORA
    ),
    "sft_lora": Task(
        command="sft",
        file="sft_lora.yaml",
        measured="loss of solutions of GSM8K, nats per token",
        metric="eval/eval gpt_loss",
        curve="train/gpt_loss",
        better="lower",
    ),
    "dpo": Task(
        command="dpo",
        file="dpo.yaml",
        measured="accuracy on pairs of HH-RLHF",
        metric="eval/acc_mean",
        curve="train/loss",
        first=0.5,
        at_least=0.6,
    ),
    "rm": Task(
        command="rm",
        file="rm.yaml",
        measured="accuracy on pairs of HH-RLHF",
        metric="eval/acc_mean",
        curve="train/loss",
        first=0.5,
        at_least=0.6,
    ),
    "ppo": Task(
        command="ppo", file="ppo.yaml", measured="reward of the reward model", curve="train/reward"
    ),
}


def openrlhf(*words: str | Path, said: str | None = None) -> str:
    """Run a command as a user would, with all cores, and return its output."""
    command = [sys.executable, "-m", "openrlhf.cli.main", *map(str, words)]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    finished = subprocess.run(
        command,
        cwd=ROOT,
        check=True,
        text=True,
        input=said,
        stdout=subprocess.PIPE,
        env=environment,
    )
    return finished.stdout


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("real-model") / "model"
    subprocess.run([sys.executable, EXAMPLE / "fetch.py", folder], check=True)
    return folder


@pytest.fixture(scope="module")
def reward_models() -> dict[int, Path]:
    """Return the run folders of trained reward models, keyed by seed.

    PPO uses the reward model trained with the same seed, or trains one if there is none.
    """
    return {}


def make_data(source: Path, folder: Path, model: Path, seed: int) -> None:
    """Write the training and evaluation rows for all runs with one seed."""
    for script, *words in (
        ("task.py", folder / "sums"),
        ("data.py", source, folder, "--model", model),
    ):
        subprocess.run(
            [sys.executable, EXAMPLE / script, *map(str, words), "--seed", str(seed)], check=True
        )


def places(task: Task, model: Path, data: Path, out: Path) -> list[str | Path]:
    """Return the flags that override the folders in the configuration file."""
    flags: list[str | Path] = [
        "--run.dir",
        out / "run",
        "--ckpt.output_dir",
        out / "model",
        "--ckpt.path",
        out / "ckpt",
    ]
    if task.file == "grpo.yaml":
        flags += [
            "--data.prompt_dataset",
            data / "sums/prompts.jsonl",
            "--eval.dataset",
            data / "sums/held_out.jsonl",
        ]
    elif task.file == "ppo.yaml":
        flags += ["--data.prompt_dataset", data / "pairs/prompts.jsonl"]
        flags += ["--eval.dataset", data / "pairs/held_out_prompts.jsonl"]
        flags += ["--reward.model_name_or_path", out / "reward/model"]
    else:
        rows = data / ("gsm8k" if task.command == "sft" else "pairs")
        flags += ["--data.dataset", rows / "train.jsonl", "--eval.dataset", rows / "held_out.jsonl"]
    policy = "--actor.model_name_or_path" if task.command == "ppo" else "--model.model_name_or_path"
    return [*flags, policy, model]


def train_reward_model(model: Path, data: Path, out: Path, seed: int) -> Path:
    """Train the reward model for PPO and return the run folder."""
    flags = [*places(RUNS["rm"], model, data, out), "--train.seed", str(seed)]
    openrlhf("rm", "--config", EXAMPLE / "rm.yaml", *flags)
    return out


@pytest.mark.timeout(5400)
@pytest.mark.parametrize("seed", SEEDS, ids="seed{}".format)
@pytest.mark.parametrize("name", RUNS)
def test_real_model_learns(
    name: str,
    seed: int,
    model: Path,
    reward_models: dict[int, Path],
    data_dir: Path,
    tmp_path: Path,
) -> None:
    task = RUNS[name]
    make_data(data_dir, tmp_path / "data", model, seed)
    if name == "ppo":
        rewards = reward_models.get(seed) or train_reward_model(
            model, tmp_path / "data", tmp_path / "rewards", seed
        )
        (tmp_path / "reward").symlink_to(rewards)
    flags = [
        *task.flags.split(),
        *places(task, model, tmp_path / "data", tmp_path),
        "--train.seed",
        str(seed),
    ]
    start = time.monotonic()
    with PeakMemory() as memory:
        openrlhf(task.command, "--config", EXAMPLE / task.file, *flags)
    seconds = time.monotonic() - start
    trained = merged(model, tmp_path)
    before, after, error = measure(task, seed, model, trained, tmp_path)
    run = RealRun(
        name=name,
        seed=seed,
        command=task.line(),
        measured=task.measured,
        before=round(before, 4),
        after=round(after, 4),
        error=round(error, 4),
        better=task.better,
        curve_of=task.curve,
        curve=[round(value, 4) for value in column(tmp_path / "run", task.curve)],
        seconds=round(seconds),
        peak_gib=round(memory.bytes / GIB, 2),
        answers=[] if name == "rm" else answers(model, trained),
        versions=versions(),
    )
    record(run)
    write_page()
    if name == "rm":
        reward_models[seed] = tmp_path
    assert run.after >= task.at_least if task.at_least else run.learned


def merged(model: Path, out: Path) -> Path:
    """Return the folder of the trained model, after merging an adapter into its base model."""
    if not (out / "model" / "adapter_config.json").exists():
        return out / "model"
    openrlhf(
        "lora_combiner",
        "--model_path",
        model,
        "--lora_path",
        out / "model",
        "--output_path",
        out / "merged",
        *FLOAT32,
    )
    return out / "merged"


def answers(before: Path, after: Path) -> list[Answered]:
    """Return both models' answers to the same questions, as printed by `interactive_chat`."""
    questions = [
        CAPITAL,
        "What is 8 + 7? Answer with the number only.",
        "My neighbor is loud at night. What can I do?",
    ]
    said = {
        folder: [chat(folder, question) for question in questions] for folder in (before, after)
    }
    rows = zip(questions, said[before], said[after], strict=True)
    return [Answered(prompt=question, before=old, after=new) for question, old, new in rows]


def chat(model: Path, question: str) -> str:
    """Return the model's answer to a question, generated with Transformers at temperature 0."""
    flags = ["--rollout.temperature", "0", "--rollout.max_new_tokens", "48", *FLOAT32]
    printed = openrlhf(
        "chat", "--model.model_name_or_path", model, *flags, said=f"{question}\n/exit\n"
    )
    return printed.split("stops an answer.\n", 1)[1].strip()


def measure(
    task: Task, seed: int, model: Path, trained: Path, out: Path
) -> tuple[float, float, float]:
    """Return the measured value before and after training, and the standard error of the change.

    `eval` measures a policy's reward: vLLM loads the exported model. Other values come from the
    run, after which either vLLM loads the exported policy and answers prompts, or the exported
    reward model scores the pairs again.
    """
    if task.command == "ppo":
        before = rewards(task, seed, model, out / "eval-before", out)
        after = rewards(task, seed, trained, out / "eval-after", out)
        changes = [after[prompt] - before[prompt] for prompt in before]
        return (
            fmean(before.values()),
            fmean(after.values()),
            stdev(changes) / math.sqrt(len(changes)),
        )
    measured = column(out / "run", task.metric)
    if task.command == "rm":
        [again] = column(score_pairs(trained, out), "eval/acc_mean")
        assert again == pytest.approx(measured[-1], abs=0.005)
    else:
        generate(trained, out)
    before = loss_before(task, model, out) if task.first is None else task.first
    return before, measured[-1], 0.0


def loss_before(task: Task, model: Path, out: Path) -> float:
    """Return the untrained model's held-out loss, measured by a run with one tiny step."""
    flags = places(task, model, out / "data", out / "untrained")
    one_step = ["--data.max_samples", "16", "--adam.lr", "1e-12"]
    openrlhf(task.command, "--config", EXAMPLE / task.file, *flags, *one_step)
    [loss] = column(out / "untrained/run", task.metric)
    return loss


def rewards(task: Task, seed: int, policy: Path, run: Path, out: Path) -> dict[str, float]:
    """Return the mean reward of a policy's answers to each held-out prompt at temperature 1."""
    words: list[str | Path] = [
        "--model.model_name_or_path",
        policy,
        "--data.apply_chat_template",
        "--eval.temperature",
        "1",
    ]
    if task.file == "grpo.yaml":
        words += [
            "--eval.dataset",
            out / "data/sums/held_out.jsonl",
            "--data.label_key",
            "answer",
            "--data.max_len",
            "80",
        ]
        words += ["--reward.remote_url", EXAMPLE / "reward.py", "--rollout.max_new_tokens", "16"]
        words += ["--eval.n_samples_per_prompt", "8"]
    else:
        words += [
            "--eval.dataset",
            out / "data/pairs/held_out_prompts.jsonl",
            "--data.max_len",
            "160",
        ]
        words += [
            "--reward.model_name_or_path",
            out / "reward/model",
            "--rollout.max_new_tokens",
            "48",
        ]
        words += ["--reward.normalize_enable", "--eval.n_samples_per_prompt", "4"]
    openrlhf(
        "eval",
        *words,
        *FLOAT32,
        "--vllm.num_engines",
        "2",
        "--train.seed",
        str(seed),
        "--run.dir",
        run,
    )
    drawn: defaultdict[str, list[float]] = defaultdict(list)
    for row in read_lines(run / "samples.jsonl"):
        drawn[row["prompt"]].append(row["reward"])
    return {prompt: fmean(values) for prompt, values in drawn.items()}


def score_pairs(reward: Path, out: Path) -> Path:
    """Score the held-out pairs with an exported reward model and return the run folder."""
    words = [
        "--task",
        "rm_accuracy",
        "--reward.model_name_or_path",
        reward,
        "--data.apply_chat_template",
    ]
    words += ["--eval.dataset", out / "data/pairs/held_out.jsonl", "--data.max_len", "192"]
    openrlhf("eval", *words, *FLOAT32, "--run.dir", out / "eval")
    return out / "eval"


def generate(policy: Path, out: Path) -> None:
    """Load an exported policy with vLLM and answer four prompts."""
    words = ["--data.dataset", out / "data/pairs/held_out_prompts.jsonl", "--data.max_samples", "4"]
    words += [
        "--model.model_name_or_path",
        policy,
        "--data.apply_chat_template",
        "--rollout.max_new_tokens",
        "32",
    ]
    openrlhf(
        "batch_inference",
        *words,
        *FLOAT32,
        "--eval_task",
        "generate",
        "--output_path",
        out / "answers.jsonl",
    )
    assert len((out / "answers.jsonl").read_text().splitlines()) == 4
