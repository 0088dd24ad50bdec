"""Tests for pages whose commands build on each other and are run in order, as printed.

Each command gets additional flags that make the run smaller. Hub names resolve to local folders
with tiny models and a few rows.
"""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.e2e.commands import LAUNCHER_VARIABLES, write_rows
from tests.sources import ROOT

pytestmark = pytest.mark.verify

MODELS = ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-7B", "Qwen/Qwen3-0.6B")
QUESTIONS = [
    (f"What is {left} plus {right}?", f"It is {left + right}")
    for left in range(8)
    for right in range(8)
]
CHAT = (
    "{% for m in messages %}{{ '[' + m['role'] + '] ' + m['content'] + '<|endoftext|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant] ' }}{% endif %}"
)
SAID = "What is 2 plus 2?\n"  # the input to an interactive chat
COMMAND = re.compile(r"(?:\bopenrlhf |openrlhf\.cli\.)(?:train_)?(\w+)")


@dataclass(frozen=True, kw_only=True)
class Sequence:
    """Blocks of commands that run in one folder.

    A block is identified by its page and a string in the block. `flags` are appended to the
    commands.
    """

    blocks: tuple[tuple[str, str], ...]
    commands: int
    flags: Mapping[str, str] = field(default_factory=dict[str, str])

    def lines(self) -> list[str]:
        """Return the commands of all blocks in order, without comments."""
        found: list[str] = []
        for page, text in self.blocks:
            blocks = re.findall(r"```bash\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
            [block] = [block for block in blocks if text in block]
            for line in block.replace("\\\n", " ").splitlines():
                found += [command for command in [re.sub(r"\s+#.*", "", line).strip()] if command]
        return found


HERE = "--ckpt.output_dir shared/{}"
SEQUENCES = {
    "README: DPO, then a chat": Sequence(
        blocks=(("README.md", "openrlhf dpo"),),
        commands=2,
        flags={"dpo": "--train.batch_size 16", "chat": "--rollout.max_new_tokens 8"},
    ),
    "tutorial: SFT, GRPO, reward model, PPO, three evaluations": Sequence(
        blocks=(
            ("docs/tutorial.md", "examples/demo/task.py"),
            ("docs/tutorial.md", "--critic.freezing_steps"),
            ("docs/evaluation.md", "openrlhf eval"),
        ),
        commands=8,
        flags={
            "sft": "--data.max_samples 640",
            "rm": "--data.max_samples 256",
            "ppo_ray": "--data.max_samples 128 --critic.freezing_steps 0",
            "eval": "--data.max_samples 64",
        },
    ),
    "tutorial: own text": Sequence(
        blocks=(("docs/tutorial.md", "examples/data/tiny_model.py"),),
        commands=4,
        flags={"chat": "--rollout.max_new_tokens 8"},
    ),
    "agents: SFT, then GRPO with an agent": Sequence(
        blocks=(("docs/agents.md", "calculator_task.py"),),
        commands=3,
        flags={"sft": "--data.max_samples 640", "ppo_ray": "--data.max_samples 64"},
    ),
    "LoRA: an adapter, merged": Sequence(
        blocks=(("docs/lora.md", "lora_combiner"),),
        commands=2,
        flags={"sft": "--train.batch_size 16"},
    ),
    "launching: one process, and Ray": Sequence(
        blocks=(("docs/launching.md", "Qwen/Qwen2.5-0.5B --data.dataset"),),
        commands=3,
        flags={
            "sft": f"--train.batch_size 16 {HERE.format('sft')}",
            "rm": f"--train.batch_size 16 --data.max_len 512 {HERE.format('rm')}",
            "ppo_ray": "--rollout.batch_size 16 --train.batch_size 64 --data.max_samples 32 "
            f"--data.max_len 128 --reward.max_error_rate 1 {HERE.format('grpo')}",
        },
    ),
    "launching: launchers": Sequence(
        blocks=(("docs/launching.md", "torchrun"),),
        commands=2,
        flags={
            "sft": f"--train.batch_size 16 {HERE.format('sft')}",
            "rm": f"--train.batch_size 16 --data.max_len 512 {HERE.format('rm')}",
        },
    ),
    "rewards: a test": Sequence(blocks=(("docs/rewards.md", "openrlhf reward test"),), commands=1),
}


def write_inputs(folder: Path) -> None:
    """Write what the pages assume: the user's files, and models and rows from the Hub."""
    (folder / "examples").symlink_to(ROOT / "examples")
    with (folder / "preferences.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["prompt", "chosen", "rejected"])
        table.writerows([question, answer, "I do not know"] for question, answer in QUESTIONS)
    for model in MODELS:
        tiny = [sys.executable, str(ROOT / "examples/data/tiny_model.py"), "preferences.csv", model]
        subprocess.run(tiny, cwd=folder, check=True, capture_output=True)
        if model.endswith("Instruct"):
            tokenizer = AutoTokenizer.from_pretrained(folder / model)
            tokenizer.chat_template = CHAT
            tokenizer.save_pretrained(folder / model)
    asked = [
        {"question": question, "answer": f"{answer}\n#### {answer.split()[-1]}"}
        for question, answer in QUESTIONS
    ]
    pairs = []
    for question, answer in QUESTIONS:
        user = {"role": "user", "content": question}
        sides = {"chosen": answer, "rejected": "I do not know"}
        pairs.append(
            {name: [user, {"role": "assistant", "content": text}] for name, text in sides.items()}
        )
    (folder / "openai/gsm8k@main").mkdir(parents=True)
    write_rows(folder / "openai/gsm8k@main/train.jsonl", asked)
    (folder / "OpenRLHF/preference_dataset_mixture2").mkdir(parents=True)
    write_rows(folder / "OpenRLHF/preference_dataset_mixture2/train.jsonl", pairs)
    write_rows(folder / "answers.jsonl", [{**row, "response": row["answer"]} for row in asked])


@pytest.mark.parametrize("name", SEQUENCES)
def test_commands_of_each_page_run_in_order(name: str, tmp_path: Path) -> None:
    sequence = SEQUENCES[name]
    lines = sequence.lines()
    assert len(lines) == sequence.commands
    write_inputs(tmp_path)
    environment = {key: value for key, value in os.environ.items() if key not in LAUNCHER_VARIABLES}
    environment |= {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HF_DATASETS_CACHE": str(tmp_path / "cache"),
    }
    for line in lines:
        verb = COMMAND.search(line)
        small = sequence.flags.get(verb[1], "") if verb else ""
        done = subprocess.run(
            ["bash", "-c", f"{line} {small}"],
            cwd=tmp_path,
            env=environment,
            input=SAID,
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode == 0, f"{line} {small}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr, f"{line} {small}\n{done.stderr}"
