"""Minimal valid command lines, and helpers that parse longer command lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openrlhf.config.combining import CombinerConfig
from openrlhf.config.doctor import DoctorConfig
from openrlhf.config.evaluation import EvaluationConfig
from openrlhf.config.inference import BatchInferenceConfig, ChatConfig
from openrlhf.config.local_ppo import LocalPPOConfig
from openrlhf.config.options import ConfigError, Reader, parse_config
from openrlhf.config.pipeline import PipelineConfig
from openrlhf.config.planning import PlanConfig
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.reward_test import RewardTestConfig
from openrlhf.config.serving import ServeConfig
from openrlhf.config.supervised import (
    DPOConfig,
    KDConfig,
    KTOConfig,
    PRMConfig,
    RMConfig,
    SFTConfig,
)

TRAINING: dict[str, type[Any]] = {
    "train_sft": SFTConfig,
    "train_rm": RMConfig,
    "train_dpo": DPOConfig,
    "train_kto": KTOConfig,
    "train_prm": PRMConfig,
    "train_kd": KDConfig,
    "train_ppo_ray": PPOConfig,
}
ROOTS: dict[str, type[Any]] = TRAINING | {
    "serve_rm": ServeConfig,
    "eval": EvaluationConfig,
    "batch_inference": BatchInferenceConfig,
    "interactive_chat": ChatConfig,
}
COMMANDS: dict[str, type[Any]] = ROOTS | {
    "reward_test": RewardTestConfig,
    "lora_combiner": CombinerConfig,
    "pipeline": PipelineConfig,
    "doctor": DoctorConfig,
    "plan": PlanConfig,
}
WITH_OLD: dict[str, type[Any]] = ROOTS | {
    "train_ppo": LocalPPOConfig
}  # same flags as train_ppo_ray
SMALLEST: dict[str, str] = {
    "train_sft": "--model.model_name_or_path m --data.dataset d --data.output_key answer",
    "train_rm": "--model.model_name_or_path m --data.dataset d",
    "train_dpo": "--model.model_name_or_path m --data.dataset d",
    "train_kto": "--model.model_name_or_path m --data.dataset d",
    "train_prm": "--model.model_name_or_path m --data.dataset d --prm.placeholder_token x",
    "train_kd": "--model.model_name_or_path m --data.dataset d --kd.teacher_model t",
    "train_ppo_ray": "--actor.model_name_or_path m --data.prompt_dataset d "
    "--algo.advantage.estimator reinforce --data.label_key l --reward.verifier math",
    "serve_rm": "--reward.model_name_or_path m",
    "eval": (
        "--model.model_name_or_path m --eval.dataset d --data.label_key l --reward.verifier math"
    ),
    "batch_inference": "--model.model_name_or_path m --data.dataset d --output_path o.jsonl",
    "interactive_chat": "--model.model_name_or_path m",
}


def read_flags(
    root: type[Any], argv: Sequence[str], *, command: str
) -> tuple[dict[str, Any], list[str]]:
    """Return a command line's values and notices before values are derived or rules are checked.

    Raises ConfigError.
    """
    reader = Reader(root, command).read(argv)
    if reader.problems:
        raise ConfigError(reader.problems)
    return reader.given, reader.notices


def parse(command: str, line: str = "") -> Any:
    """Return the configuration parsed from a minimal command line with `line` appended."""
    smallest = SMALLEST[command]
    if "--reward.remote_url" in line:  # two reward sources would be rejected
        smallest = smallest.replace("--reward.verifier math", "")
    return parse_config(ROOTS[command], [*smallest.split(), *line.split()], command=command)


def sft(line: str = "") -> SFTConfig:
    return parse("train_sft", line)


def ppo(line: str = "") -> PPOConfig:
    return parse("train_ppo_ray", line)


def violations(command: str, line: str) -> list[str]:
    """Return the violations found when `line` is appended to a minimal command line."""
    try:
        parse(command, line)
    except ConfigError as error:
        return error.violations
    return []
