"""Roots of the commands that answer and train nothing: what those with engines share,
`batch_inference`, `interactive_chat`.
"""

from __future__ import annotations

import os
from typing import Any, ClassVar

from openrlhf.config import machine, ppo_rules, rules, shared
from openrlhf.config.commands import ModelCommand, RecordedCommand
from openrlhf.config.effects import EFFECTS, Effects, Sentences, combined
from openrlhf.config.flags import Section, amend, option, required
from openrlhf.config.ppo import engine_values
from openrlhf.config.rollout import RewardConfig, RolloutConfig, SamplingConfig, VLLMConfig
from openrlhf.config.supervised import RMDeepSpeedConfig


# fmt: off
class SampledModelConfig(shared.ModelSourceConfig):
    """The model."""
    model_name_or_path: str | None = option(None, "Folder or hub name of a language model.", holds="model")

class EngineCommand(ModelCommand):
    """What every command has that uses engines and trains nothing."""
    model: SampledModelConfig = SampledModelConfig()
    vllm: VLLMConfig = VLLMConfig()
    rollout: RolloutConfig = RolloutConfig()
    train: shared.ProcessConfig = shared.ProcessConfig()

    def engine_values(self, *, shared: bool) -> dict[str, Any]:
        """What follows for engines, by path; `shared`: samples share prefixes."""
        engines = engine_values(self.vllm, self.rollout, self.ds.param_dtype, shared=shared)
        return engines | {"vllm.enable_sleep": False}

    def engine_mistakes(self) -> Sentences:
        """What may be wrong with engines and sampling."""
        return [*combined(self, "refused", "sampling"), *ppo_rules.engine_mistakes(self)]


class RepetitionConfig(Section):
    """Sampling."""
    repetition_penalty: float = option(1.0, "Above 1, tokens that have occurred become less likely. In a chat, the default is the value in the model's generation configuration.", gt=0)

class InferenceRolloutConfig(RepetitionConfig, RolloutConfig):
    """Sampling."""

class ChatSamplingConfig(RepetitionConfig, SamplingConfig):
    """Sampling."""

class CsftConfig(Section):
    """Conditional fine-tuning."""
    enable: bool = option(False, "Ask for answers of a reward: put csft.prompt behind each prompt.")
    prompt: str = option("<rm_score>: 5.00", "The reward in words.", needs="enable")

    @property
    def suffix(self) -> str:
        """The text behind a prompt, as the default of --reward_template puts it there in training.
        """
        return f" {self.prompt.strip()} " if self.enable else ""


class InferenceDataConfig(shared.EndedTextConfig, shared.DatasetConfig):
    """Tokenizer and data."""
    columns: ClassVar = ("input_key",)  # what is read of a row with a prompt
    label_key: ClassVar[str | None] = None
    multiturn: ClassVar[bool] = False
    input_key: str = option("input", "Column with the prompt, text or chat.")
    output_key: str | None = option("output", "Column with the answer to score; unset: of a chat, its last turn.")

class BatchInferenceConfig(EngineCommand, RecordedCommand):
    """Answers to the prompts of a dataset, or the scores of answers."""
    effects: ClassVar[Effects] = EFFECTS["batch_inference"]

    task: str = option(
        "generate", "Answer prompts (generate_vllm is the same), or score answers with reward models.",
        choices=("generate", "generate_vllm", "rm"))
    output_path: str = required("File for the results, one JSON object per line. After a kill, the same command continues it.", holds="place", writes="file")
    best_of_n: int = option(1, "Answers to each prompt.", ge=1)
    iter: int | None = option(None, "Use the rows from iter x rollout.batch_size on, so many.", ge=0)
    post_processor: str = option(
        "none", "What is written of scored answers: all; the best of each input (rs); all, with the reward in the input "
        "(csft); the best and the worst of each input as a pair (iter_dpo).", choices=("none", "rs", "csft", "iter_dpo"))
    reward_template: str = option("{input} <rm_score>: {reward} ", "Input with the reward in it.")
    data: InferenceDataConfig = InferenceDataConfig(max_samples=100_000_000)
    reward: RewardConfig = RewardConfig()
    rollout: InferenceRolloutConfig = InferenceRolloutConfig(batch_size=2048, micro_batch_size=16, max_new_tokens=1024)
    train: shared.ProcessConfig = shared.ProcessConfig(seed=1234)
    ds: RMDeepSpeedConfig = RMDeepSpeedConfig()
    csft: CsftConfig = CsftConfig()
    local_rank: int = option(-1, "Set by launchers, which set LOCAL_RANK too.", saved=False)

    @property
    def samples_answers(self) -> bool:
        """Whether the model answers prompts; else reward models score answers."""
        return self.task != "rm"

    def derived_values(self) -> dict[str, Any]:
        """What follows from the flags, by path: all GPUs are used; the model is the one that
        scores; an answer has half the room.
        """
        gpus, room = machine.count_gpus(), rules.room(self)
        own = self.unless_given({
            "data.max_len": room,
            "rollout.max_new_tokens": min(1024, room // 2 or 1),
            "vllm.num_engines": max(1, gpus // self.vllm.devices),
            "reward.num_gpus_per_node": min(8, gpus) or 1,
            "reward.model_name_or_path": None if self.samples_answers else self.model.model_name_or_path,
        })
        own |= {} if self.samples_answers else {"csft.enable": False}
        if self.data.apply_chat_template and not self.given.get("data.output_key"):
            own["data.output_key"] = None
        return own | amend(self, own).engine_values(shared=True)

    def mistakes(self) -> Sentences:
        """What may be wrong with this resolved configuration."""
        incomplete = not all(word in self.reward_template for word in ("{input}", "{reward}"))
        return [
            *super().mistakes(),
            *rules.probabilities_fit(self, "data.dataset", "data.dataset_probs"),
            (os.path.isdir(self.output_path or ""), "<output_path> is a folder: name a file in it."),
            (incomplete and self.post_processor == "csft", "<reward_template> needs both {input} and {reward}."),
            *(self.engine_mistakes() if self.samples_answers else rules.sum_mistakes(self.reward, len(self.reward.models))),
            *combined(self, "refused", "batch_inference"),
        ]


class ChatModelConfig(shared.ModelSourceConfig):
    """The model."""
    model_name_or_path: str = required("Folder or hub name of a language model.", holds="model")

class ChatConfig(ModelCommand):
    """A conversation with a model."""
    effects: ClassVar[Effects] = EFFECTS["interactive_chat"]

    model: ChatModelConfig = ChatModelConfig()
    data: shared.FormatConfig = shared.FormatConfig(max_len=4096)
    rollout: ChatSamplingConfig = ChatSamplingConfig(temperature=0.2, top_p=0.9, max_new_tokens=1024)
    csft: CsftConfig = CsftConfig()
    system: str | None = option(None, "System prompt.")
    preamble: str | None = option(None, "File whose text comes before the conversation.", holds="place")

    def derived_values(self) -> dict[str, Any]:
        """What follows from the flags, by path: a conversation fits into the model; an answer takes
        half of a short one.
        """
        room = rules.room(self)
        return self.unless_given({"data.max_len": room, "rollout.max_new_tokens": min(1024, room // 2 or 1)})

    def mistakes(self) -> Sentences:
        """What may be wrong with this resolved configuration."""
        template = self.data.input_template
        return [
            *super().mistakes(),
            (template is not None and "{}" not in template, "<data.input_template> has no {} for the message."),
            (self.preamble and not rules.is_file(self.preamble), "<preamble> is no file on this machine."),
            *combined(self, "refused", "engines"),
        ]
