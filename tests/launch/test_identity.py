"""Run identities, which differ if the runs' data, models or losses differ."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset, concatenate_datasets
from transformers import AutoConfig

from openrlhf.checkpoints.manifest import differences
from openrlhf.config.inference import BatchInferenceConfig
from openrlhf.config.learning import RLDataConfig
from openrlhf.config.options import parse_config
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.supervised import KDConfig, KTOConfig, RMConfig, SFTConfig
from openrlhf.core.trajectory import Prompt
from openrlhf.data.prompts import PromptDataset
from openrlhf.data.rows import contents_of
from openrlhf.data.sft import SFTRow
from openrlhf.launch import identity
from openrlhf.launch.identity import (
    Identity,
    inference_identity,
    of_model,
    offline_identity,
    rl_identity,
)
from openrlhf.trainers.distill import DistillationTask
from openrlhf.trainers.kto import KTOTask
from openrlhf.trainers.reward import RewardTask
from openrlhf.trainers.sft import SFTTask
from tests.tiny import character_tokenizer, save_tiny_model

LINE = "--model.model_name_or_path {0} --data.dataset {0} --output_path out.jsonl"
ROWS = [
    {"input": f"{n}+1=", "output": f"{n + 1}", "chosen": "yes", "rejected": "no"}
    for n in range(100)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


KINDS: dict[str, Any] = {
    "sft": (SFTConfig, SFTTask),
    "rm": (RMConfig, RewardTask),
    "kto": (KTOConfig, KTOTask),
    "kd": (KDConfig, DistillationTask),
}


def offline(model: str, command: str = "sft", rows: Any = ROWS, line: str = "") -> Identity:
    root, kind = KINDS[command]
    needed = f"--model.model_name_or_path {model} --data.dataset {model}"
    output = "--data.output_key output" if command in ("sft", "kd") else ""
    task: Any = kind(parse_config(root, f"{needed} {output} {line}".split(), command=command))
    return offline_identity(task, task.rows(Dataset.from_list(list(rows)), character_tokenizer()))


def rl(
    model: str, rows: Any = ROWS, line: str = "--algo.advantage.estimator reinforce"
) -> Identity:
    needed = (
        f"--actor.model_name_or_path {model} --data.prompt_dataset {model} "
        "--reward.remote_url http://reward:5000"
    )
    config = parse_config(
        PPOConfig, f"{needed} --data.label_key output {line}".split(), command="ppo"
    )
    tokenizer = character_tokenizer()
    prompts = PromptDataset(
        Dataset.from_list(list(rows)), tokenizer, RLDataConfig(label_key="output")
    )
    return rl_identity(config, prompts)


def names(then: Identity, now: Identity) -> list[str]:
    return [difference.partition(":")[0] for difference in differences(then, now)]


def test_same_flags_and_rows_have_the_same_identity(model: str) -> None:
    assert differences(offline(model), offline(model)) == differences(rl(model), rl(model)) == []


def test_identity_differences_name_the_task_rows_and_loss(model: str) -> None:
    assert names(offline(model), offline(model, "rm"))[0] == "task"
    changed = [*ROWS[:-1], ROWS[-1] | {"output": "x"}]
    assert names(offline(model), offline(model, rows=changed)) == [
        "all rows of --data.dataset, tokenized"
    ]
    templated = offline(model, line="--data.input_template {}!")
    assert names(offline(model), templated) == ["all rows of --data.dataset, tokenized"]
    assert names(offline(model, "rm"), offline(model, "rm", line="--model.loss_type logexp")) == [
        "--model.loss_type"
    ]


def test_identity_differences_name_the_estimator_prompts_and_policy(
    model: str, tmp_path: Path
) -> None:
    assert names(
        rl(model),
        rl(model, line="--algo.advantage.estimator rloo --rollout.n_samples_per_prompt 2"),
    ) == ["--algo.advantage.estimator"]
    assert "prompts" in names(rl(model), rl(model, [*ROWS[:-1], ROWS[-1] | {"output": "x"}]))[0]
    other = save_tiny_model(tmp_path / "other", seed=1)
    assert names(rl(model), rl(other)) == ["--actor.model_name_or_path"]


def test_identity_differences_name_the_reference_and_teacher(model: str, tmp_path: Path) -> None:
    other = save_tiny_model(tmp_path, seed=1)
    for command, flag in (("kto", "--ref.model_name_or_path"), ("kd", "--kd.teacher_model")):
        runs = [offline(model, command, line=f"{flag} {path}") for path in (model, other)]
        assert names(*runs) == [flag]
    teachers = "--algo.advantage.estimator reinforce --algo.distill.teacher "
    assert names(rl(model, line=teachers + model), rl(model, line=teachers + other)) == [
        "--algo.distill.teacher"
    ]


def test_trust_remote_code_applies_to_the_policy_and_the_teacher(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trusted: list[bool] = []

    def from_pretrained(path: str, *, trust_remote_code: bool) -> Any:
        trusted.append(trust_remote_code)
        return AutoConfig.from_pretrained(path)

    loaders = SimpleNamespace(from_pretrained=from_pretrained)
    monkeypatch.setattr(identity, "AutoConfig", loaders)
    line = f"--algo.advantage.estimator reinforce --algo.distill.teacher {model}"
    rl(model, line=f"{line} --model.trust_remote_code")
    assert trusted == [True, True]


def test_model_identity_does_not_depend_on_its_folder(model: str, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "copy")
    copy = of_model(str(tmp_path / "copy"), trust_remote_code=False)
    assert of_model(model, trust_remote_code=False) == copy


# ---- every row affects the identity


def prompts_of(rows: Any) -> list[Prompt]:
    prompts = []
    for index, row in enumerate(rows):
        prompts.append(Prompt(index=index, text=row["input"], tokens=[], label=row["output"]))
    return prompts


@pytest.mark.parametrize("place", [0, 1, 17, 98, 99])
def test_changing_any_row_changes_the_identity(place: int, model: str) -> None:
    changed = [*ROWS[:place], ROWS[place] | {"output": "x", "chosen": "x"}, *ROWS[place + 1 :]]
    for command, line in (("sft", ""), ("rm", ""), ("kto", "--data.layout columns")):
        before = offline(model, command, line=line)
        after = offline(model, command, changed, line)
        assert names(before, after) == ["all rows of --data.dataset, tokenized"]
    assert len(names(rl(model), rl(model, changed))) == 1
    config: Any = parse_config(
        BatchInferenceConfig, LINE.format(model).split(), command="batch_inference"
    )
    before = inference_identity(config, prompts_of(ROWS))
    assert names(before, inference_identity(config, prompts_of(changed))) == [
        "rows of --data.dataset, rendered"
    ]


def test_plugin_rows_are_compared_by_their_collated_tensors(model: str) -> None:
    task: Any = SFTTask(parse_config(SFTConfig, LINE.format(model).split()[:4], command="sft"))
    rows = [SFTRow(tokens=[5, n], loss_mask=[False, True]) for n in range(100)]
    before = offline_identity(task, Listed(rows))
    assert names(before, offline_identity(task, Listed(list(rows)))) == []
    changed = [*rows[:17], replace(rows[17], tokens=[5, 200]), *rows[18:]]
    assert names(before, offline_identity(task, Listed(changed))) == [
        "all rows of --data.dataset, tokenized"
    ]


class Listed(list[Any]):
    """A plug-in's rows, stored in a list."""

    summary = "rows"


def test_row_contents_do_not_depend_on_storage_format() -> None:
    rows = [
        {"t": [n] * (n % 7), "m": [bool(n % 2), True] * (n % 5), "s": "é" * (n % 3)}
        for n in range(3000)
    ]
    plain = Dataset.from_list(rows)
    parts = concatenate_datasets([plain.select(range(1234)), plain.select(range(1234, 3000))])
    chosen = plain.select(range(2999, -1, -1)).select(range(2999, -1, -1))
    saved = b"".join(contents_of(plain))
    assert b"".join(contents_of(parts)) == b"".join(contents_of(chosen)) == saved
    for change in ({"m": [True]}, {"s": "e"}, {"t": []}, {"t": None}):
        changed = Dataset.from_list([*rows[:2000], rows[2000] | change, *rows[2001:]])
        assert b"".join(contents_of(changed)) != saved


@pytest.mark.parametrize("label", [["a", "b"], {"a": list(range(2000))}, 0.5, None])
def test_row_contents_differ_for_different_labels_of_any_type(label: Any) -> None:
    def contents(value: Any) -> bytes:
        return b"".join(contents_of(Dataset.from_list([{"label": value}] * 3)))

    assert contents(label) == contents(label) != contents("other")
    if isinstance(label, dict):  # every number in a row affects the identity
        other = {"a": [*range(1000), -1, *range(1001, 2000)]}
        assert contents(other) != contents(label)
