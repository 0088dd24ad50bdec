"""Roots of the offline commands: their own flags and defaults, derived values and rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from openrlhf.config import machine, rules, shared
from openrlhf.config.commands import Root
from openrlhf.config.effects import Sentences
from openrlhf.config.flags import Section, option


# fmt: off
class SupervisedConfig(shared.OptimizerConfig, Root):
    """What the offline commands share."""
    model: shared.ModelConfig = shared.ModelConfig()
    ds: shared.DeepSpeedConfig = shared.DeepSpeedConfig()
    data: shared.OfflineDataConfig = shared.OfflineDataConfig()

    def derived_values(self) -> dict[str, Any]:
        """The default micro-batch of a small batch is the batch; a chat template in a file is the text of that file."""
        of_rank = max(1, self.train.batch_size // machine.world_size())
        micro, template = self.train.micro_batch_size, self.data.tokenizer_chat_template
        fits = "train.micro_batch_size" in self.given or micro <= of_rank
        return {
            "train.micro_batch_size": micro if fits else of_rank,
            "data.tokenizer_chat_template":
                Path(template).expanduser().read_text(encoding="utf-8") if rules.is_file(template) else template,
        }

    def notices(self) -> Sentences:
        """What the user may have to know of this resolved configuration."""
        micro = self.train.micro_batch_size
        return [
            ("train.micro_batch_size" not in self.given and micro != type(self)().train.micro_batch_size,
             f"--train.micro_batch_size is {micro}: a rank has no more of <train.batch_size>."),
            *super().notices(),
        ]

    def mistakes(self) -> Sentences:
        """What may be wrong with this resolved configuration."""
        ranks, template = machine.world_size(), self.data.tokenizer_chat_template
        return [
            *super().mistakes(),
            (template and "{" not in template,
             "<data.tokenizer_chat_template> is neither a template, which has {{ or {% in it, nor a file on this machine."),
            *rules.balance_reaches_routers("model", self.model),
            *rules.batch_fits_ranks(
                self.train.batch_size, ranks, micro=self.train.micro_batch_size,
                what=f"the launcher started {ranks}"),
            *rules.probabilities_fit(self, "data.dataset", "data.dataset_probs"),
        ]


class SFTModelConfig(shared.ModelConfig):
    pretrain_mode_enable: bool = option(False, "Pretraining: raw text, every token is a target.")


class SFTDataConfig(shared.OfflineDataConfig):
    multiturn: bool = option(False, "Learn every assistant turn of a chat.")
    input_key: str = option("input", "Column with the prompt, text or chat.")
    output_key: str | None = option(None, "Column with the response; unset: the chat's last turn.")


class SFTConfig(SupervisedConfig):
    """Supervised fine-tuning."""
    effects: ClassVar[dict[str, str]] = {
        "!model.pretrain_mode_enable": "data.output_key data.apply_chat_template data.input_template"
    }

    ckpt: shared.CheckpointConfig = shared.CheckpointConfig(path="./ckpt/checkpoints_sft")
    logger: shared.LoggerConfig = shared.LoggerConfig(wandb=shared.WandbConfig(project="openrlhf_train_sft"))
    train: shared.TrainConfig = shared.TrainConfig(max_epochs=2)
    model: SFTModelConfig = SFTModelConfig()
    ds: shared.LMDeepSpeedConfig = shared.LMDeepSpeedConfig()
    data: SFTDataConfig = SFTDataConfig(input_template="User: {}\nAssistant: ")

    def mistakes(self) -> Sentences:
        """What may be wrong with this resolved configuration."""
        data, plain = self.data, self.model.pretrain_mode_enable
        return [
            *super().mistakes(),
            (data.multiturn and not data.apply_chat_template,
             "--data.multiturn needs --data.apply_chat_template: only a chat has turns."),
            (not (data.output_key or data.apply_chat_template or plain),
             "No column has the response: name it with --data.output_key, or use --data.apply_chat_template for chats, or "
             "--model.pretrain_mode_enable for plain text."),
        ]


class PairColumns(Section):
    """Columns of pairs."""
    prompt_key: str | None = option(None, "Column with the prompt of both answers; unset: the answers contain it.")
    chosen_key: str = option("chosen", "Column with the preferred answer or conversation.")
    rejected_key: str = option("rejected", "Column with the other answer or conversation.")


class PreferenceDataConfig(PairColumns, shared.OfflineDataConfig):
    """Tokenizer and data."""


class RMModelConfig(shared.ModelConfig):
    loss_type: str = option("sigmoid", "Pairwise loss; both names are the same one.", choices=("sigmoid", "logexp"))
    margin_loss_enable: bool = option(
        False, "Ask for the margin of the column margin (sigmoid).", needs="!loss_type=logexp")
    compute_fp32_loss_enable: bool = option(False, "No effect: rewards are float32 always.", needs="!always")
    reinit_head: bool = option(False, "A fresh scalar head even where one is stored.")


class RMDeepSpeedConfig(shared.DeepSpeedConfig):
    value_head_prefix: str = option("score", "Name of the scalar head; a stored one wins.")


class RMConfig(SupervisedConfig):
    """Reward model from preference pairs."""
    measures_training_rows: ClassVar[bool] = True

    ckpt: shared.CheckpointConfig = shared.CheckpointConfig(path="./ckpt/checkpoints_rm")
    logger: shared.LoggerConfig = shared.LoggerConfig(wandb=shared.WandbConfig(project="openrlhf_train_rm"))
    adam: shared.AdamConfig = shared.AdamConfig(lr=9e-6)
    train: shared.TrainConfig = shared.TrainConfig(micro_batch_size=1)
    model: RMModelConfig = RMModelConfig()
    ds: RMDeepSpeedConfig = RMDeepSpeedConfig()
    data: PreferenceDataConfig = PreferenceDataConfig(max_len=512)
