"""Flags of `batch_inference`, `interactive_chat` and `train_ppo`.

The tests cover rules, derived values, and the defaults of older releases.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from openrlhf.config.flags import value_at
from openrlhf.config.local_ppo import LocalPPOConfig
from openrlhf.config.options import parse_config
from tests.config.commands import parse, violations

BATCH, CHAT = "batch_inference", "interactive_chat"


@pytest.mark.parametrize(
    ("command", "line", "sentence"),
    [
        (BATCH, "--output_path=/tmp", "--output_path /tmp is a folder: pass the path of a file"),
        (
            BATCH,
            "--data.dataset d,e --data.dataset_probs 1",
            "--data.dataset_probs 1 must be 2 positive number(s)",
        ),
        (BATCH, "--model.model_name_or_path=", "--model.model_name_or_path is required"),
        (
            BATCH,
            "--model.model_name_or_path= --task rm",
            "--task rm needs a reward model: set --reward.model_name_or_path",
        ),
        (
            BATCH,
            "--task rm --reward.weights 1 2",
            "--reward.weights 1 2 has 2 numbers for 1 rewards",
        ),
        (
            BATCH,
            "--task rm --post_processor csft --reward_template x",
            "--reward_template x needs both {input} and {reward}",
        ),
        (BATCH, "--best_of_n 0", "--best_of_n is 0, but it must be at least 1"),
        (
            BATCH,
            "--vllm.tensor_parallel_size 0",
            "--vllm.tensor_parallel_size is 0, but it must be",
        ),
        (
            BATCH,
            "--data.max_len 64 --rollout.max_new_tokens 64",
            "--rollout.max_new_tokens 64 leaves no room for a prompt",
        ),
        (
            BATCH,
            "--reward.process_model p",
            "--reward.process_model p can only score answers during sampling",
        ),
        (BATCH, "--ds.param_dtype fp16", "--ds.param_dtype fp16 is not supported by engines"),
        (
            BATCH,
            "--post_processor best",
            "--post_processor must be one of none, rs, csft, iter_dpo, not 'best'",
        ),
        (CHAT, "--preamble gone.txt", "--preamble gone.txt is not a file on this machine"),
        (
            CHAT,
            "--data.input_template=x",
            "--data.input_template x has no {} placeholder for the message",
        ),
        (CHAT, "--model.model_name_or_path=", "--model.model_name_or_path is required"),
        (
            CHAT,
            "--data.max_len 8 --rollout.max_new_tokens 8",
            "--rollout.max_new_tokens 8 leaves no room for a prompt in --data.max_len 8",
        ),
    ],
)
def test_broken_rule_names_the_flag_and_the_value(command: str, line: str, sentence: str) -> None:
    assert any(sentence in text for text in violations(command, line)), violations(command, line)


def test_batch_inference_uses_all_gpus_by_default(gpu_machine: Any) -> None:
    gpu_machine(8)
    config = parse(BATCH, "--vllm.tensor_parallel_size 2")
    assert (config.vllm.num_engines, config.vllm.max_engines, config.reward.num_gpus_per_node) == (
        4,
        4,
        8,
    )
    assert parse(BATCH, "--vllm.num_engines 3").vllm.num_engines == 3


def test_model_flag_of_an_old_scoring_command_sets_the_reward_model() -> None:
    config = parse(BATCH, "--eval_task rm")
    assert config.reward.models == ["m"]
    assert parse(BATCH, "").reward.models == []
    assert parse(BATCH, "").data.label_key is None


@pytest.mark.parametrize("command", [CHAT, BATCH])
@pytest.mark.parametrize(("max_len", "answer"), [("4096", 1024), ("1024", 512), ("2", 1)])
def test_answer_may_use_half_of_a_short_context(command: str, max_len: str, answer: int) -> None:
    assert parse(command, f"--max_len {max_len}").rollout.max_new_tokens == answer
    assert (
        parse(
            command, f"--data.max_len {max_len} --rollout.max_new_tokens 1"
        ).rollout.max_new_tokens
        == 1
    )


@pytest.mark.parametrize("command", [CHAT, BATCH, "eval"])
def test_length_defaults_to_the_context_length_of_the_model_if_shorter(
    command: str, tmp_path: Path
) -> None:
    def lengths(line: str) -> tuple[int, int | None]:
        rule = " --eval.dataset d --reward.verifier math" if command == "eval" else ""
        config = parse(command, f"--model.model_name_or_path {tmp_path} {line}{rule}")
        return config.data.max_len, config.rollout.max_new_tokens

    default, answer = lengths("")
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 96}')
    assert lengths("") == (96, None if command == "eval" else 48)
    # A length given by the user is kept, and rejected only when the model is loaded.
    assert lengths("--data.max_len 512")[0] == 512
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 100000}')
    assert lengths("") == (default, answer)
    (tmp_path / "config.json").write_text("{")
    assert lengths("") == (default, answer)


def test_config_json_in_the_working_directory_is_ignored_without_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 96}')
    monkeypatch.chdir(tmp_path)
    line = "--task rm --reward.model_name_or_path m --model.model_name_or_path="
    assert parse(BATCH, line).data.max_len == 2048


def test_flag_of_another_task_gets_a_notice(capsys: pytest.CaptureFixture[str]) -> None:
    parse(BATCH, "--task rm --best_of_n 2")
    parse(BATCH, "--post_processor rs")
    errors = capsys.readouterr().err
    assert "--best_of_n: no effect with --task rm" in errors
    assert "--post_processor: no effect without --task rm" in errors


OLD_DEFAULTS = {
    "rollout.batch_size": 512,
    "rollout.micro_batch_size": 8,
    "train.batch_size": 128,
    "train.micro_batch_size": 4,
    "train.seed": 42,
    "train.ema_beta": 0.992,
    "data.max_samples": 1_000_000,
    "data.max_len": 2048,
    "rollout.max_new_tokens": 1024,
    "actor.eps_clip": 0.2,
    "critic.value_clip": 0.2,
    "algo.advantage.lambd": 0.95,
    "algo.kl.init_coef": 0.01,
    "actor.adam.lr": 1e-6,
    "critic.adam.lr": 9e-6,
    "ckpt.path": "./ckpt/checkpoints_ppo",
    "ckpt.max_mem": 1e8,
    "logger.wandb.project": "openrlhf_train_ppo",
}


def local(line: str = "") -> LocalPPOConfig:
    words = f"--pretrain m --reward_pretrain r --prompt_data d {line}".split()
    return parse_config(LocalPPOConfig, words, command="train_ppo")


def test_train_ppo_keeps_its_old_defaults() -> None:
    config = local()
    assert {path: value_at(config, path) for path in OLD_DEFAULTS} == OLD_DEFAULTS


def test_train_ppo_places_all_models_and_engines_on_all_gpus(gpu_machine: Any) -> None:
    gpu_machine(4)
    config = local()
    sizes = [
        value_at(config, f"{role}.num_gpus_per_node")
        for role in ("actor", "critic", "ref", "reward")
    ]
    assert (sizes, config.vllm.num_engines, config.hybrid) == ([4] * 4, 4, True)
    assert config.vllm.enable_sleep and config.ds.enable_sleep
    assert local("--actor.num_gpus_per_node 2").vllm.num_engines == 2
    assert not local("--zero_stage 0").ds.enable_sleep
