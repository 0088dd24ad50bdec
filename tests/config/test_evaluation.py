"""Flags of `eval`: the requirements of each task, and flags without an effect."""

from __future__ import annotations

import pytest

from openrlhf.config.evaluation import EvaluationConfig
from openrlhf.config.options import ConfigError, parse_config

MODEL, RULE = "--model.model_name_or_path m", "--reward.remote_url http://h"


def evaluation(line: str) -> EvaluationConfig:
    return parse_config(EvaluationConfig, ["--eval.dataset", "d", *line.split()], command="eval")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (RULE, "--model.model_name_or_path is required"),
        (MODEL, "The samples have no reward"),
        (f"{MODEL} --reward.verifier math --data.layout columns",
         "--reward.verifier math checks responses against labels"),
        (f"{MODEL} {RULE} --ds.param_dtype fp16",
         "--ds.param_dtype fp16 is not supported by engines"),
        (f"{MODEL} {RULE} --vllm.pipeline_parallel_size 2",
         "vLLM does not support pipeline parallelism on CPUs"),
        (f"{MODEL} {RULE} --data.max_len 8 --rollout.max_new_tokens 8",
         "leaves no room for a prompt"),
        (f"{MODEL} {RULE} --reward.weights 1 2",
         "--reward.weights 1 2 has 2 numbers for 1 rewards"),
        (f"{MODEL} {RULE} --reward.on_error never",
         "--reward.on_error takes fail, drop or a number"),
        (f"{MODEL} {RULE} --vllm.num_engines 0", "--vllm.num_engines is 0"),
        (f"{MODEL} --train.agent_func_path gone.py",
         "--train.agent_func_path gone.py is not a .py file"),
        (f"{MODEL} {RULE} --rollout.remote_engines h:80",
         "--rollout.remote_engines h:80 is not an http(s) URL"),
        (f"{MODEL} {RULE} --train.agent_func_path {__file__}",
         "rewards itself: leave out --reward.remote_url"),
        (f"--task win_rate {MODEL} --train.agent_func_path {__file__} --against.answer_key c",
         "that the agent cannot reward"),
        ("--task rm_accuracy",
         "--task rm_accuracy evaluates reward models: set --reward.model_name_or_path"),
        (f"--task win_rate {MODEL} {RULE}", "set either --against.model_name_or_path"),
        (f"--task win_rate {MODEL} {RULE} --against.model_name_or_path b --against.answer_key c",
         "one other source"),
        (f"--task win_rate {MODEL} --against.answer_key c",
         "one way to decide which answer is better"),
        (f"--task win_rate {MODEL} {RULE} --against.answer_key c "
         "--judge.url http://j --judge.model m", "needs one way"),
        (f"--task win_rate {MODEL} --against.answer_key c --judge.url http://j",
         "choose one with --judge.model"),
        (f"--task win_rate {MODEL} --against.answer_key c --judge.url j --judge.model m",
         "--judge.url j is not an http"),
        (f"--task win_rate {MODEL} --against.answer_key c --judge.url http://j "
         "--judge.model m --reward.on_error 0", "gives verdicts"),
    ],
)  # fmt: skip
def test_missing_requirements_of_a_task_are_named(line: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        evaluation(line)
    assert len(caught.value.violations) == 1
    assert said in caught.value.violations[0]


@pytest.mark.parametrize(
    "line",
    [
        f"{MODEL} {RULE}",
        f"{MODEL} --train.agent_func_path {__file__}",
        f"{MODEL} --reward.model_name_or_path a,b --reward.weights 1 2",
        "--task rm_accuracy --reward.model_name_or_path r",
        f"--task win_rate {MODEL} --against.model_name_or_path b --reward.model_name_or_path r",
        (
            f"--task win_rate {MODEL} --against.answer_key c --judge.url http://j "
            "--judge.model m --reward.on_error drop"
        ),
    ],
)
def test_task_with_all_requirements_is_accepted(line: str) -> None:
    evaluation(line)


def test_flags_without_effect_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    evaluation(f"{MODEL} {RULE} --eval.steps 3 --judge.model j --rollout.temperature 0.5")
    said = capsys.readouterr().err
    assert "--eval.steps, --rollout.temperature: no effect with this command." in said
    assert "--judge.model: no effect without --task win_rate." in said


def test_reward_model_flags_have_no_effect_without_a_reward_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line, idle = (
        "--ds.zero_stage 3 --train.full_determinism_enable",
        "--ds.zero_stage, --train.full_determinism_enable",
    )
    evaluation(f"{MODEL} {RULE} {line}")
    assert f"{idle}: no effect without --reward.model_name_or_path." in capsys.readouterr().err
    evaluation(f"{MODEL} --reward.model_name_or_path r {line}")
    assert "no effect" not in capsys.readouterr().err


def test_evaluation_derives_engine_settings() -> None:
    config = evaluation(f"{MODEL} {RULE} --ds.param_dtype fp32")
    assert (config.vllm.dtype, config.vllm.enable_prefix_caching) == ("fp32", True)
    assert config.run.dir.startswith("./runs/eval-")
