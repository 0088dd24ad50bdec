"""Configurations of `batch_inference` and `interactive_chat`, and the base class of commands that
use engines without training.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, ClassVar

from openrlhf.config import machine, rules, sampling_rules, shared
from openrlhf.config.commands import ModelCommand, RecordedCommand
from openrlhf.config.flags import Section, Unused, amend, count, option, required, switch, unset
from openrlhf.config.ppo import engine_values
from openrlhf.config.rollout import RewardConfig, RolloutConfig, SamplingConfig, VLLMConfig
from openrlhf.config.supervised import RMDeepSpeedConfig

# Flags that have no effect in commands that only generate or score.
TRAINING_FLAGS = (
    "rollout.n_samples_per_prompt",
    "rollout.dump_dir",
    "rollout.replay_dir",
    "rollout.only",
    "rollout.vllm_generate_batch_size",
    "vllm.sync_backend",
    "vllm.sync_with_ray",
    "vllm.enable_sleep",
    "data.dataloader_num_workers",
    "logger.logging_steps",
    "ds.grad_accum_dtype",
    "ds.overlap_comm",
    "ds.adam_offload",
    "ds.nvme_path",
    "ds.param_offload",
    "ds.zpg",
    "ds.use_universal_ckpt",
    "ds.lora",
)
# Flags for generating answers in `batch_inference`.
ANSWERING_FLAGS = (
    "vllm",
    "best_of_n",
    "csft.enable",
    "csft.prompt",
    "rollout.max_new_tokens",
    "rollout.temperature",
    "rollout.top_p",
    "rollout.top_k",
    "rollout.stop",
    "rollout.stop_token_ids",
    "rollout.seeded",
    "rollout.repetition_penalty",
)
# Flags for running a command's reward models.
SCORING_FLAGS = (
    "rollout.micro_batch_size",
    "rollout.max_tokens_per_gpu",
    "ds.value_head_prefix",
    "ds.attn_implementation",
    "ds.packing_samples",
    "ds.zero_stage",
    "ds.load_in_4bit",
    "train.full_determinism_enable",
)
LONGEST_DEFAULT_ANSWER = 1024  # tokens


def answer_length(room: int) -> int:
    """Return the default of --rollout.max_new_tokens for a context of `room` tokens."""
    return min(LONGEST_DEFAULT_ANSWER, room // 2 or 1)


class SampledModelConfig(shared.ModelSourceConfig):
    """The model."""

    model_name_or_path: str | None = unset("Folder or Hub name of a language model.", holds="model")


class EngineCommand(ModelCommand):
    """Base class of commands that use engines without training."""

    model: SampledModelConfig = SampledModelConfig()
    vllm: VLLMConfig = VLLMConfig()
    rollout: RolloutConfig = RolloutConfig()
    train: shared.ProcessConfig = shared.ProcessConfig()

    def engine_values(self, *, shared: bool) -> dict[str, Any]:
        """Return derived engine settings. `shared` is true if samples share prefixes."""
        engines = engine_values(self.vllm, self.rollout, self.ds.param_dtype, shared=shared)
        return engines | {"vllm.enable_sleep": False}

    def engine_violations(self) -> Iterator[str]:
        """Yield violations of the rules for engines and sampling."""
        if not self.model.model_name_or_path:
            yield "--model.model_name_or_path is required."
        if self.vllm.dtype == "fp16":
            yield "<ds.param_dtype> is not supported by engines: set --vllm.dtype to bf16 or fp32."
        yield from sampling_rules.engine_violations(self.vllm, self.rollout, self.data.max_len)


class RepetitionConfig(Section):
    """Sampling."""

    repetition_penalty: float = option(
        1.0,
        "Values above 1 make tokens that have already occurred less likely. In a chat, the "
        "default comes from the model's generation configuration.",
        gt=0,
    )


class InferenceRolloutConfig(RepetitionConfig, RolloutConfig):
    """Sampling."""


class ChatSamplingConfig(RepetitionConfig, SamplingConfig):
    """Sampling."""


class CsftConfig(Section):
    """Conditional fine-tuning."""

    enable: bool = switch("Ask for answers with a given reward: append csft.prompt to each prompt.")
    prompt: str = option("<rm_score>: 5.00", "Text that states the desired reward.", needs="enable")

    @property
    def suffix(self) -> str:
        """Text to append to a prompt.

        The default --reward_template adds the same text to training data.
        """
        if not self.enable:
            return ""
        return f" {self.prompt.strip()} "


class InferenceDataConfig(shared.EndedTextConfig, shared.DatasetConfig):
    """Tokenizer and data."""

    columns: ClassVar = ("input_key",)  # columns that are read from a row
    label_key: ClassVar[str | None] = None
    multiturn: ClassVar[bool] = False
    input_key: str = option("input", "Column with the prompt, as text or chat.")
    output_key: str | None = option(
        "output", "Column with the answer to score; unset: the last turn of the chat."
    )


class BatchInferenceConfig(EngineCommand, RecordedCommand):
    """Generate answers to the prompts of a dataset, or score answers."""

    task: str = option(
        "generate",
        "generate, generate_vllm: answer prompts. rm: score answers with reward models.",
        choices=("generate", "generate_vllm", "rm"),
    )
    output_path: str = required(
        "Output file, one JSON object per line. After an interruption, the same command continues "
        "it.",
        holds="place",
        writes="file",
    )
    best_of_n: int = count(1, "Number of answers per prompt.")
    iter: int | None = unset(
        "Process only rollout.batch_size rows, starting at row iter x rollout.batch_size.",
        ge=0,
    )
    post_processor: str = option(
        "none",
        "Scored answers to write. none: all. rs: the best for each input. csft: all, with the "
        "reward in the input. iter_dpo: the best and the worst for each input, as a pair.",
        choices=("none", "rs", "csft", "iter_dpo"),
    )
    reward_template: str = option(
        "{input} <rm_score>: {reward} ",
        "Template for an input that includes the reward.",
    )
    data: InferenceDataConfig = InferenceDataConfig(max_samples=100_000_000)
    reward: RewardConfig = RewardConfig()
    rollout: InferenceRolloutConfig = InferenceRolloutConfig(
        batch_size=2048, micro_batch_size=16, max_new_tokens=1024
    )
    train: shared.ProcessConfig = shared.ProcessConfig(seed=1234)
    ds: RMDeepSpeedConfig = RMDeepSpeedConfig()
    csft: CsftConfig = CsftConfig()
    local_rank: int = option(-1, "Set by launchers, which also set LOCAL_RANK.", saved=False)

    @property
    def samples_answers(self) -> bool:
        """True if the model answers prompts; otherwise reward models score answers."""
        return self.task != "rm"

    def derived_values(self) -> dict[str, Any]:
        """Return the values derived from the flags, keyed by flag path.

        By default, all GPUs are used, --model.model_name_or_path is also the reward model, and an
        answer may take half of the context.
        """
        gpus = machine.count_gpus()
        room = rules.room(self)
        values: dict[str, Any] = {
            "data.max_len": room,
            "rollout.max_new_tokens": answer_length(room),
            "vllm.num_engines": max(1, gpus // max(1, self.vllm.devices)),
            "reward.num_gpus_per_node": min(8, gpus) or 1,
        }
        if not self.samples_answers:
            values["reward.model_name_or_path"] = self.model.model_name_or_path
        own = self.unless_given(values)
        if not self.samples_answers:
            own["csft.enable"] = False
        if self.data.apply_chat_template and not self.given.get("data.output_key"):
            own["data.output_key"] = None
        return own | amend(self, own).engine_values(shared=True)

    def violations(self) -> Iterator[str]:
        """Yield a sentence for each mistake in this resolved configuration."""
        yield from super().violations()
        yield from rules.probability_violations(self, "data.dataset", "data.dataset_probs")
        if os.path.isdir(self.output_path or ""):
            yield "<output_path> is a folder: pass the path of a file."
        is_complete = "{input}" in self.reward_template and "{reward}" in self.reward_template
        if self.post_processor == "csft" and not is_complete:
            yield "<reward_template> needs both {input} and {reward}."
        if self.reward.process_model:
            yield "<reward.process_model> can only score answers during sampling: leave it out."
        if self.samples_answers:
            yield from self.engine_violations()
            return
        yield from sampling_rules.sum_violations(self.reward, len(self.reward.models))
        if not self.reward.scalars:
            yield "<task> needs a reward model: set --reward.model_name_or_path."

    def unused(self) -> Iterator[Unused]:
        """Yield the flags that have no effect with the current settings."""
        episodes = [
            "rollout.remote_engines",
            "rollout.max_turns",
            "rollout.step_timeout",
            "rollout.episode_timeout",
            "train.agent_func_path",
            "vllm.enable_prefix_caching",
        ]
        reward_models = [
            "reward.model_name_or_path",
            "reward.process_model",
            "reward.normalize_enable",
            "reward.weights",
            "reward.offload",
            "reward.num_nodes",
            "reward.num_gpus_per_node",
        ]
        names = [*TRAINING_FLAGS, *episodes, "reward"]
        yield Unused(names, "with this command", but=reward_models)
        if self.samples_answers:
            scoring = ["reward", "post_processor", "data.output_key", "data.space_before_eos"]
            yield Unused([*scoring, *SCORING_FLAGS], "without --task rm")
        else:
            yield Unused(ANSWERING_FLAGS, "with --task rm")
        if self.post_processor != "csft":
            yield Unused(["reward_template"], "without --post_processor csft")
        if not self.reward.models:
            yield Unused(["reward.normalize_enable"], "without --reward.model_name_or_path")


class ChatModelConfig(shared.ModelSourceConfig):
    """The model."""

    model_name_or_path: str = required("Folder or Hub name of a language model.", holds="model")


class ChatConfig(ModelCommand):
    """Chat with a model."""

    model: ChatModelConfig = ChatModelConfig()
    data: shared.FormatConfig = shared.FormatConfig(max_len=4096)
    rollout: ChatSamplingConfig = ChatSamplingConfig(
        temperature=0.2, top_p=0.9, max_new_tokens=1024
    )
    csft: CsftConfig = CsftConfig()
    system: str | None = unset("System prompt.")
    preamble: str | None = unset("File with text to put before the conversation.", holds="place")

    def derived_values(self) -> dict[str, Any]:
        """Return the values derived from the flags, keyed by flag path.

        By default, a conversation may fill the model's context, and an answer may fill half of a
        short context.
        """
        room = rules.room(self)
        values = {"data.max_len": room, "rollout.max_new_tokens": answer_length(room)}
        return self.unless_given(values)

    def violations(self) -> Iterator[str]:
        """Yield a sentence for each mistake in this resolved configuration."""
        yield from super().violations()
        template = self.data.input_template
        if template is not None and "{}" not in template:
            yield "<data.input_template> has no {} placeholder for the message."
        if self.preamble and not rules.is_file(self.preamble):
            yield "<preamble> is not a file on this machine."
        yield from sampling_rules.room_violations(self.rollout, self.data.max_len)

    def unused(self) -> Iterator[Unused]:
        """Yield the flags that have no effect with the current settings."""
        yield Unused(["ds.packing_samples"], "with this command")
