"""Two runs are told apart by what they learn from, what they train and what they minimise."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from openrlhf.checkpoints.manifest import differences
from openrlhf.config.learning import RLDataConfig
from openrlhf.config.options import parse_config
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.supervised import RMConfig, SFTConfig
from openrlhf.data.prompts import PromptDataset
from openrlhf.launch.identity import Identity, of_model, of_rows, offline_identity, rl_identity
from openrlhf.trainers.reward import RewardTask
from openrlhf.trainers.sft import SFTTask
from tests.tiny import character_tokenizer, save_tiny_model

ROWS = [{"input": f"{n}+1=", "output": f"{n + 1}", "chosen": "yes", "rejected": "no"} for n in range(100)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def offline(model: str, command: str = "sft", rows: Any = ROWS, line: str = "") -> Identity:
    root, kind = {"sft": (SFTConfig, SFTTask), "rm": (RMConfig, RewardTask)}[command]
    needed = f"--model.model_name_or_path {model} --data.dataset {model}"
    output = "--data.output_key output" if command == "sft" else ""
    task: Any = kind(parse_config(root, f"{needed} {output} {line}".split(), command=command))
    return offline_identity(task, task.rows(Dataset.from_list(list(rows)), character_tokenizer()))


def rl(model: str, rows: Any = ROWS, line: str = "--algo.advantage.estimator reinforce") -> Identity:
    needed = f"--actor.model_name_or_path {model} --data.prompt_dataset {model} --reward.remote_url http://reward:5000"
    config = parse_config(PPOConfig, f"{needed} --data.label_key output {line}".split(), command="ppo")
    tokenizer = character_tokenizer()
    prompts = PromptDataset(Dataset.from_list(list(rows)), tokenizer, RLDataConfig(label_key="output"))
    return rl_identity(config, prompts, tokenizer)


def names(then: Identity, now: Identity) -> list[str]:
    return [difference.partition(":")[0] for difference in differences(then, now)]


def test_a_run_is_the_same_as_itself(model: str) -> None:
    assert differences(offline(model), offline(model)) == differences(rl(model), rl(model)) == []


def test_another_task_another_row_and_another_loss_are_named(model: str) -> None:
    assert names(offline(model), offline(model, "rm"))[0] == "task"
    changed = [*ROWS[:-1], ROWS[-1] | {"output": "x"}]
    assert names(offline(model), offline(model, rows=changed)) == ["rows of --data.dataset, tokenized"]
    templated = offline(model, line="--data.input_template {}!")
    assert names(offline(model), templated) == ["rows of --data.dataset, tokenized"]
    assert names(offline(model, "rm"), offline(model, "rm", line="--model.loss_type logexp")) == ["--model.loss_type"]


def test_another_estimator_label_and_policy_are_named(model: str, tmp_path: Path) -> None:
    assert names(rl(model), rl(model, line="--algo.advantage.estimator rloo --rollout.n_samples_per_prompt 2")) == [
        "--algo.advantage.estimator"
    ]
    assert "prompts" in names(rl(model), rl(model, [*ROWS[:-1], ROWS[-1] | {"output": "x"}]))[0]
    other = save_tiny_model(tmp_path / "other", seed=1)
    assert names(rl(model), rl(other)) == ["--actor.model_name_or_path"]


def test_a_model_is_the_same_in_another_folder(model: str, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "copy")
    assert of_model(model) == of_model(str(tmp_path / "copy"))


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 1000])
def test_the_first_and_the_last_row_are_always_compared_and_no_row_twice(count: int) -> None:
    seen: list[int] = []
    of_rows(count, seen.append)
    assert (seen[0], seen[-1]) == (0, count - 1)
    assert len(seen) == len(set(seen)) == min(count, 64)
