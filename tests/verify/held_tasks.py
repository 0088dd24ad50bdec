"""Three small tasks that were not used to choose defaults, and minimal commands for the tasks.

`python -m tests.verify.held_tasks FOLDER --task adding --dtype bf16 --seed 1` runs the four
commands of a task and prints pass@1 on held-out problems before and after reinforcement learning.

A problem is a line of text, and its answer is the label. The commands set paths, columns, learning
rates (the defaults are for models a thousand times larger), and the batch sizes of supervised
training (the default of 128 would give too few steps with so few rows). To run on a CPU, the
commands also set large micro-batches and a limit on the response length. All other flags keep their
defaults.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from openrlhf.observability.run_folder import read_lines
from tests.ranks import ROOT
from tests.tiny import character_tokenizer, tiny_config

END, PAD = "<eos>", "<pad>"
REWARD = Path(__file__).parent / "held_reward.py"
HELD_OUT, SAMPLES = 400, 4  # number of problems, and responses per problem
WORKED, PROMPTS = 3072, 4096  # number of problems with a worked answer, and number without one
DTYPES = ("bf16", "fp32")
POLICY_LR = 3e-5
Problem = tuple[str, str]  # text, answer


def count_a_letter(draw: random.Random) -> Problem:
    """Return a problem such as `b in abcbd=` with the answer `2`."""
    letter, text = draw.choice("abcd"), "".join(draw.choices("abcd", k=draw.randint(4, 10)))
    return f"{letter} in {text}=", str(text.count(letter))


def add_digits(draw: random.Random) -> Problem:
    """Return a problem such as `3+8+5=` with the answer `16`."""
    digits = draw.choices(range(10), k=draw.randint(3, 5))
    return f"{'+'.join(map(str, digits))}=", str(sum(digits))


def sort_letters(draw: random.Random) -> Problem:
    """Return a problem such as `dbca=` with the answer `abcd`."""
    letters = draw.choices("abcdefgh", k=draw.randint(4, 7))
    return f"{''.join(letters)}=", "".join(sorted(letters))


TASKS: dict[str, Callable[[random.Random], Problem]] = {
    "counting": count_a_letter,
    "adding": add_digits,
    "sorting": sort_letters,
}


def make_task(folder: Path, task: str, seed: int) -> None:
    """Write an untrained model, worked problems, pairs, prompts and held-out problems.

    No problem occurs in more than one of the files.
    """
    folder.mkdir(parents=True)
    draw = random.Random(seed)
    problems = list(
        dict.fromkeys(TASKS[task](draw) for _ in range(3 * (WORKED + PROMPTS + HELD_OUT)))
    )
    held_out, worked = problems[:HELD_OUT], problems[HELD_OUT : HELD_OUT + WORKED]
    prompts = problems[HELD_OUT + WORKED :][:PROMPTS]
    for name, rows in {"held_out": held_out, "worked": worked, "prompts": prompts}.items():
        write_rows(
            folder / f"{name}.jsonl",
            [{"input": text, "output": answer + END} for text, answer in rows],
        )
    pairs = [
        {"prompt": text, "chosen": answer + END, "rejected": wrong_answer(answer, draw) + END}
        for text, answer in worked + prompts
    ]
    write_rows(folder / "pairs.jsonl", pairs)
    make_model(folder / "model", seed)


def write_rows(path: Path, rows: Sequence[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def wrong_answer(answer: str, draw: random.Random) -> str:
    """Return a near miss, like the wrong answers of a trained model.

    A number is off by up to 3; in a string, one letter is replaced, omitted or repeated.
    """
    if answer.isdigit():
        return draw.choice(
            [str(int(answer) + off) for off in (-3, -2, -1, 1, 2, 3) if int(answer) + off >= 0]
        )
    place = draw.randrange(len(answer))
    other = draw.choice([letter for letter in "abcdefgh" if letter != answer[place]])
    return answer[:place] + draw.choice([other, answer[place] * 2, ""]) + answer[place + 1 :]


def make_model(folder: Path, seed: int) -> None:
    """Save an untrained Qwen2 of 0.8 million parameters, with one token per character.

    The model's maximum length is the one that --data.max_len requires.
    """
    torch.manual_seed(seed)
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "max_position_embeddings": 2048,
    }
    AutoModelForCausalLM.from_config(tiny_config("qwen2-tied", **sizes)).float().save_pretrained(
        folder
    )
    character_tokenizer().save_pretrained(folder)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A model's held-out pass@1, and the difference from the SFT model's pass@1.

    Standard errors are computed over problems, which are the same before and after training.
    """

    pass_at_1: float
    error: float
    change: float = 0.0
    change_error: float = 0.0

    @classmethod
    def of(cls, solved: Sequence[float], before: Sequence[float] | None = None) -> Outcome:
        """Compute the outcome from the fraction of correct responses to each problem."""
        changes = [after - start for after, start in zip(solved, before or solved, strict=True)]
        return cls(
            pass_at_1=fmean(solved),
            error=_error(solved),
            change=fmean(changes),
            change_error=_error(changes),
        )

    @property
    def got_worse(self) -> bool:
        """Return whether pass@1 fell by more than two standard errors."""
        return self.change < -2 * self.change_error


def _error(values: Sequence[float]) -> float:
    return stdev(values) / len(values) ** 0.5


@dataclass(frozen=True, kw_only=True)
class Chain:
    """The outcomes of SFT, PPO and GRPO on one task with one precision and one seed."""

    task: str
    dtype: str
    seed: int
    pairs_right: float  # fraction of the last training pairs that the reward model ranked correctly
    sft: Outcome
    ppo: Outcome
    grpo: Outcome


def commands(task: Path, out: Path, dtype: str, seed: int) -> dict[str, list[str]]:
    """Return a minimal command for each stage that trains on a task."""
    places = {
        stage: f"--train.seed {seed} --ds.param_dtype {dtype} --run.dir {out}/{stage} "
        f"--ckpt.output_dir {out}/{stage}/model --ckpt.path {out}/{stage}/checkpoints"
        for stage in ("sft", "rm", "ppo", "grpo")
    }
    reinforced = (
        f"train_ppo_ray --actor.model_name_or_path {out}/sft/model "
        f"--data.prompt_dataset {task}/prompts.jsonl --data.label_key output "
        f"--actor.adam.lr {POLICY_LR} --rollout.max_new_tokens 12 --rollout.micro_batch_size 128 "
        "--train.micro_batch_size 128"
    )
    lines = {
        "sft": f"train_sft --model.model_name_or_path {task}/model "
        f"--data.dataset {task}/worked.jsonl --data.output_key output --data.input_template {{}} "
        "--adam.lr 1e-3 --train.batch_size 32 --train.micro_batch_size 32 --train.max_epochs 4",
        "rm": f"train_rm --model.model_name_or_path {out}/sft/model "
        f"--data.dataset {task}/pairs.jsonl --data.prompt_key prompt --adam.lr 1e-4 "
        "--train.batch_size 32 --train.micro_batch_size 32 --train.max_epochs 4",
        "ppo": f"{reinforced} --reward.model_name_or_path {out}/rm/model --critic.adam.lr 3e-4",
        "grpo": f"{reinforced} --reward.remote_url {REWARD} --algo.advantage.estimator group_norm "
        "--rollout.n_samples_per_prompt 8 --rollout.batch_size 128 --data.max_samples 1024",
    }
    return {stage: f"{line} {places[stage]}".split() for stage, line in lines.items()}


def run_chain(folder: Path, task: str, dtype: str, seed: int) -> Chain:
    """Create the task, run its four commands, and measure how much each model solves."""
    data, out = folder / f"{task}-{seed}", folder / f"{task}-{seed}-{dtype}"
    if not data.exists():
        make_task(data, task, seed)
    for command, *flags in commands(data, out, dtype, seed).values():
        subprocess.run(
            [sys.executable, "-m", f"openrlhf.cli.{command}", *flags], cwd=ROOT, check=True
        )
    problems = [json.loads(line) for line in (data / "held_out.jsonl").read_text().splitlines()]
    before, ppo, grpo = (
        solved(out / stage / "model", problems) for stage in ("sft", "ppo", "grpo")
    )
    accuracy = [
        row["train/acc"] for row in read_lines(out / "rm" / "metrics.jsonl") if "train/acc" in row
    ]
    return Chain(
        task=task,
        dtype=dtype,
        seed=seed,
        pairs_right=fmean(accuracy[-len(accuracy) // 4 :]),
        sft=Outcome.of(before),
        ppo=Outcome.of(ppo, before),
        grpo=Outcome.of(grpo, before),
    )


def solved(model: Path, problems: Sequence[dict[str, str]]) -> list[float]:
    """Return, for each problem, the fraction of its `SAMPLES` responses that are correct.

    Responses are sampled with Transformers at temperature 1, in float32.
    """
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    hf: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    texts = tokenizer([row["input"] for row in problems], return_tensors="pt", padding=True)
    torch.manual_seed(0)
    with torch.no_grad():
        tokens = hf.generate(
            **texts, do_sample=True, top_k=0, max_new_tokens=12, num_return_sequences=SAMPLES
        )
    responses = tokenizer.batch_decode(tokens[:, texts["input_ids"].shape[1] :])
    labels = [row["output"] for row in problems for _ in range(SAMPLES)]
    right = [
        response.removesuffix(END).split(END)[0] + END == label
        for response, label in zip(
            (each.replace(PAD, "") for each in responses), labels, strict=True
        )
    ]
    return [fmean(right[first : first + SAMPLES]) for first in range(0, len(right), SAMPLES)]


def main() -> None:
    """Run one chain and print its outcome."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--task", choices=TASKS, default="adding")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(json.dumps(asdict(run_chain(options.folder, options.task, options.dtype, options.seed))))


if __name__ == "__main__":
    main()
