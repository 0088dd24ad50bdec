"""Configuration files: read with --config, written into the run folder, the same configuration again."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from openrlhf.config.options import ConfigError, dump_yaml, parse_config
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.supervised import SFTConfig
from tests.config.commands import ROOTS, ppo, sft

CASES = [
    ("train_sft", ""),
    ("train_sft", "--train.batch_size 4 --ds.packing_samples --adam.betas 0.8 0.9"),
    ("train_sft", "--data.apply_chat_template --muon.no_nesterov --ckpt.max_mem 1e3"),
    ("train_ppo_ray", ""),
    ("train_ppo_ray", "--actor.eps_clip 0.1 --train.dynamic_batch_enable --rollout.top_k 5"),
    ("train_ppo_ray", "--algo.advantage.gamma 0.5 --vllm.engine_args={"
     '"a":{"b":[1,null]}} --rollout.seeded off --reward.on_error 0'),
    ("train_ppo_ray", "--algo.advantage.estimator rloo --rollout.n_samples_per_prompt 4 "
     "--vllm.disable_prefix_caching --train.colocate_actor_ref --actor.num_gpus_per_node 2"),
]  # fmt: skip


def load(command: str, file: Path, *flags: str):
    return parse_config(ROOTS[command], ["--config", str(file), *flags], command=command)


@pytest.mark.parametrize(("command", "line"), CASES)
def test_a_resolved_configuration_read_back_is_the_same_configuration(command: str, line: str, tmp_path: Path) -> None:
    config = {"train_sft": sft, "train_ppo_ray": ppo}[command](line)
    file = tmp_path / "config.yaml"
    file.write_text(dump_yaml(config))
    again = load(command, file)
    assert again == config
    assert dump_yaml(again) == dump_yaml(config)


def test_keys_may_be_nested_dotted_or_both(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "model.model_name_or_path: m\n"
        "data: {dataset: d, output_key: a}\n"
        "ds:\n  lora.alpha: 8\n  lora:\n    dropout: 0.5\n"
    )
    config = load("train_sft", file)
    assert (config.ds.lora.alpha, config.ds.lora.dropout) == (8, 0.5)
    assert config.data.dataset == "d"


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(dump_yaml(sft("--train.seed 7 --adam.lr 1e-3")))
    config = load("train_sft", file, "--train.seed", "8")
    assert (config.train.seed, config.adam.lr) == (8, 1e-3)


def test_yaml_spellings_of_values_are_understood(tmp_path: Path) -> None:
    """YAML reads 1e-6 as a text, 1 as a whole number and on as a truth value."""
    file = tmp_path / "run.yaml"
    file.write_text(dump_yaml(ppo()))
    content = yaml.safe_load(file.read_text())
    content["rollout"]["seeded"] = True
    content["algo"]["kl"]["init_coef"] = 1
    content["actor"]["adam"] = {"lr": "1e-6"}
    content["logger"]["wandb"]["project"] = 7
    content["train"]["batch_size"] = 64.0
    file.write_text(yaml.safe_dump(content))
    config = load("train_ppo_ray", file)
    assert config.rollout.seeded == "on"
    assert config.algo.kl.init_coef == 1.0
    assert config.actor.adam.lr == 1e-6
    assert config.logger.wandb.project == "7"
    assert config.train.batch_size == 64


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("trian: {batch_size: 3}", "run.yaml: train_sft has no flag trian.batch_size. Did you mean "
         "train.batch_size"),
        ("pretrain: m", "train_sft has no flag pretrain. Did you mean model.model_name_or_path?"),
        ("train: {batch_size: [1]}", "run.yaml: --train.batch_size takes a whole number, not [1]"),
        ("train: {seed: null}", "--train.seed takes a whole number, not None"),
        ("ds: {packing_samples: 1}", "--ds.packing_samples is a switch: true or false, not 1"),
        ("adam: {betas: [1, 2, 3]}", "--adam.betas takes two numbers, not 3"),
        ("train.seed: 1\ntrain: {seed: 2}", "run.yaml: train.seed is there twice"),
        ("- 1", "run.yaml holds a list, not names and values"),
        ("a: [", "run.yaml cannot be read"),
    ],
)  # fmt: skip
def test_mistakes_in_a_file_name_the_file_and_the_key(text: str, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load("train_sft", file)
    assert sentence in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--config .*gone\.yaml cannot be read"):
        load("train_sft", tmp_path / "gone.yaml")


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("")
    with pytest.raises(ConfigError, match=r"--data\.dataset must be given"):
        load("train_sft", file)


def test_null_is_as_good_as_not_given_unless_the_default_is_something(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(dump_yaml(ppo()))
    text = yaml.safe_load(file.read_text())
    text["actor"]["eps_clip_low_high"] = text["vllm"]["max_engines"] = None
    file.write_text(yaml.safe_dump(text))
    assert load("train_ppo_ray", file).actor.eps_clip_low_high == (0.2, 0.2)
    file.write_text(dump_yaml(sft()))
    text = yaml.safe_load(file.read_text())
    text["data"]["input_template"] = None
    file.write_text(yaml.safe_dump(text))
    assert load("train_sft", file).data.input_template is None


def test_what_belongs_to_one_launch_is_not_written() -> None:
    written = yaml.safe_load(dump_yaml(sft("--dry_run --local_rank 3 --logger.wandb.key secret")))
    assert "dry_run" not in written and "local_rank" not in written
    assert "key" not in written["logger"]["wandb"]


def test_values_of_a_file_count_as_given(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(dump_yaml(ppo()))
    config = load("train_ppo_ray", file, "--actor.num_gpus_per_node", "2")
    assert config.ref.num_gpus_per_node == 1  # as the file says, not as the machine says
    assert type(config) is PPOConfig and type(sft()) is SFTConfig
