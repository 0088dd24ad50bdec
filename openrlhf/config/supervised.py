"""Roots of the offline commands: their own flags and defaults, derived values and rules."""

from __future__ import annotations

from typing import Any, ClassVar

from openrlhf.config import machine, rules, shared
from openrlhf.config.flags import Section, option
from openrlhf.config.rules import Given, Replaced, Sentences


class SupervisedConfig(shared.OptimizerConfig, shared.Root, title="What the offline commands share."):
    model: shared.ModelConfig = shared.ModelConfig()
    ds: shared.DeepSpeedConfig = shared.DeepSpeedConfig()
    data: shared.OfflineDataConfig = shared.OfflineDataConfig()

    def derived_values(self, given: Given) -> dict[str, Any]:
        """The default micro-batch of a small batch is the batch."""
        ranks = max(1, machine.world_size() // self.ds.group_size)
        share = max(1, self.train.batch_size // ranks)
        micro = self.train.micro_batch_size
        fits = "train.micro_batch_size" in given or micro <= share
        return {"train.micro_batch_size": micro if fits else share}

    # fmt: off
    def notices(self, replaced: Replaced, given: Given) -> Sentences:
        """What the user may have to know of this resolved configuration."""
        data = self.data
        return [
            ("train.micro_batch_size" in replaced,
             f"--train.micro_batch_size is {self.train.micro_batch_size}: a rank has no more of "
         "<train.batch_size>."),
            (data.tokenizer_chat_template is not None and not data.apply_chat_template,
             "--data.tokenizer_chat_template has no effect without --data.apply_chat_template."),
            *rules.muon_notices("", self),
            *super().notices(replaced, given),
        ]

    def mistakes(self) -> Sentences:
        """What may be wrong with this resolved configuration."""
        ranks, micro = machine.world_size(), self.train.micro_batch_size
        what = f"the launcher started {ranks}"
        return [
            *super().mistakes(),
            (self.ds.ring_attn_size > 1 and not self.ds.packing_samples,
             "<ds.ring_attn_size> needs --ds.packing_samples."),
            *rules.balance_reaches_routers("model", self.model),
            *rules.batch_fits_ranks(self, ranks, micro=micro, what=what),
            *rules.probabilities_fit(self, "data.dataset", "data.dataset_probs"),
        ]


class SFTModelConfig(shared.ModelConfig):
    pretrain_mode_enable: bool = option(False, "Pretraining: raw text, every token is a target.")


class SFTDataConfig(shared.OfflineDataConfig):
    multiturn: bool = option(False, "Learn every assistant turn of a chat.")
    input_key: str = option("input", "Column with the prompt, text or chat.")
    output_key: str | None = option(None, "Column with the response; unset: the chat's last turn.")


class SFTConfig(SupervisedConfig, title="Supervised fine-tuning."):
    run_name_prefix: ClassVar[str] = "sft_"

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
            (
                data.multiturn and not data.apply_chat_template,
                "--data.multiturn needs --data.apply_chat_template: turns are those of a chat.",
            ),
            (
                not (data.output_key or data.apply_chat_template or plain),
                "The response is nowhere: name its column with --data.output_key, or use --data."
                "apply_chat_template for chats, or --model.pretrain_mode_enable for plain text.",
            ),
        ]


class PairColumns(Section, title="Columns of pairs."):
    prompt_key: str | None = option(None, "Column with the prompt of both; unset: it is in them.")
    chosen_key: str = option("chosen", "Column with the preferred answer or conversation.")
    rejected_key: str = option("rejected", "Column with the other one.")


class PreferenceDataConfig(PairColumns, shared.OfflineDataConfig, title="Tokenizer and data."):
    pass


class RMModelConfig(shared.ModelConfig):
    loss_type: str = option("sigmoid", "Pairwise loss; both names are the same one.", choices=("sigmoid", "logexp"))
    margin_loss_enable: bool = option(False, "Ask for the margin of the column margin (sigmoid).")
    compute_fp32_loss_enable: bool = option(False, "No effect: rewards are float32 always.")
    reinit_head: bool = option(False, "A fresh scalar head even where one is stored.")


class RMDeepSpeedConfig(shared.DeepSpeedConfig):
    value_head_prefix: str = option("score", "Name of the scalar head; a stored one wins.")


class RMConfig(SupervisedConfig, title="Reward model from preference pairs."):
    run_name_prefix: ClassVar[str] = "rm_"
    evaluates_given_data_only: ClassVar[bool] = False

    ckpt: shared.CheckpointConfig = shared.CheckpointConfig(path="./ckpt/checkpoints_rm")
    logger: shared.LoggerConfig = shared.LoggerConfig(wandb=shared.WandbConfig(project="openrlhf_train_rm"))
    adam: shared.AdamConfig = shared.AdamConfig(lr=9e-6)
    train: shared.TrainConfig = shared.TrainConfig(micro_batch_size=1)
    model: RMModelConfig = RMModelConfig()
    ds: RMDeepSpeedConfig = RMDeepSpeedConfig()
    data: PreferenceDataConfig = PreferenceDataConfig(max_len=512)

    def notices(self, replaced: Replaced, given: Given) -> Sentences:
        """What the user may have to know of this resolved configuration."""
        model = self.model
        return [
            (
                model.margin_loss_enable and model.loss_type == "logexp",
                "--model.margin_loss_enable has no effect with --model.loss_type logexp.",
            ),
            *super().notices(replaced, given),
        ]
