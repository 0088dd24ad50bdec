"""Commands that can be stages of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass

from openrlhf.config.combining import CombinerConfig
from openrlhf.config.commands import Command
from openrlhf.config.evaluation import EvaluationConfig
from openrlhf.config.inference import BatchInferenceConfig
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.supervised import (
    DPOConfig,
    KDConfig,
    KTOConfig,
    PRMConfig,
    RMConfig,
    SFTConfig,
)


@dataclass(frozen=True)
class StageCommand:
    """A command, its flags, and the part of its output folder that later stages use."""

    command: str  # module in openrlhf.cli
    flags: type[Command]
    result: str = "model"  # path relative to the stage's folder


STAGE_COMMANDS = {
    "sft": StageCommand("train_sft", SFTConfig),
    "rm": StageCommand("train_rm", RMConfig),
    "dpo": StageCommand("train_dpo", DPOConfig),
    "kto": StageCommand("train_kto", KTOConfig),
    "prm": StageCommand("train_prm", PRMConfig),
    "kd": StageCommand("train_kd", KDConfig),
    "ppo": StageCommand("train_ppo_ray", PPOConfig),
    "eval": StageCommand("eval", EvaluationConfig, result="."),
    "batch_inference": StageCommand(
        "batch_inference", BatchInferenceConfig, result="answers.jsonl"
    ),
    "lora_combiner": StageCommand("lora_combiner", CombinerConfig),
}
