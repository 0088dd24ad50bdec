"""Roots of the offline commands: their own flags and defaults, derived values and rules."""

from __future__ import annotations

from typing import Any, ClassVar

from openrlhf.config import choices, machine, rules, shared
from openrlhf.config.commands import Root
from openrlhf.config.effects import EFFECTS, Effects, Sentences, combined
from openrlhf.config.flags import Section, option, required, text_of


# fmt: off
class SupervisedConfig(shared.OptimizerConfig, Root):
    """What the offline commands share."""
    model: shared.ModelConfig = shared.ModelConfig()
    ds: shared.DeepSpeedConfig = shared.LMDeepSpeedConfig()
    data: shared.OfflineDataConfig = shared.OfflineDataConfig()

    def derived_values(self) -> dict[str, Any]:
        """The default micro-batch of a small batch is the batch; a chat template in a file is the
        text of that file.
        """
        of_rank = max(1, self.train.batch_size // self.ds.data_slices(machine.world_size()))
        micro, template = self.train.micro_batch_size, self.data.tokenizer_chat_template
        fits = "train.micro_batch_size" in self.given or micro <= of_rank
        return {
            "train.micro_batch_size": micro if fits else of_rank,
            "data.tokenizer_chat_template":
                text_of("--data.tokenizer_chat_template", template) if rules.is_file(template) else template,
        }

    def notices(self) -> Sentences:
        """What the user may have to know of this resolved configuration."""
        micro = self.train.micro_batch_size
        return [
            ("train.micro_batch_size" not in self.given and micro != type(self)().train.micro_batch_size,
             f"--train.micro_batch_size is {micro}: a rank has no more of <train.batch_size>."),
            *rules.held_out_notices(self, "data.dataset", "data.dataset_split"),
            *super().notices(),
        ]

    def mistakes(self) -> Sentences:
        """What may be wrong with this resolved configuration."""
        ranks, template = self.ds.data_slices(machine.world_size()), self.data.tokenizer_chat_template
        return [
            *super().mistakes(),
            (template and "{" not in template,
             "<data.tokenizer_chat_template> is neither a template, which has {{ or {% in it, nor a file on this machine."),
            *rules.batch_fits_ranks(
                self.train.batch_size, ranks, micro=self.train.micro_batch_size,
                what=f"the launcher started {ranks}"),
            *rules.probabilities_fit(self, "data.dataset", "data.dataset_probs"),
        ]


class SFTModelConfig(shared.ModelConfig):
    pretrain_mode_enable: bool = option(False, "Pretraining: raw text, every token is a target.")


class ResponseDataConfig(shared.OfflineDataConfig):
    input_key: str = option("input", "Column with the prompt, text or chat.")
    output_key: str | None = option(None, "Column with the response; unset: the chat's last turn.")


class SFTDataConfig(ResponseDataConfig):
    multiturn: bool = option(False, "Learn every assistant turn of a chat.")


class SFTConfig(SupervisedConfig):
    """Supervised fine-tuning."""
    effects: ClassVar[Effects] = EFFECTS["sft"]

    ckpt: shared.CheckpointConfig = shared.CheckpointConfig(path="./ckpt/checkpoints_sft")
    logger: shared.LoggerConfig = shared.LoggerConfig(wandb=shared.WandbConfig(project="openrlhf_train_sft"))
    train: shared.TrainConfig = shared.TrainConfig(max_epochs=2)
    model: SFTModelConfig = SFTModelConfig()
    data: SFTDataConfig = SFTDataConfig(input_template="User: {}\nAssistant: ")

    def derived_values(self) -> dict[str, Any]:
        """Plain text has no layout."""
        return super().derived_values() | ({"data.layout": "columns"} if self.model.pretrain_mode_enable else {})

    def mistakes(self) -> Sentences:
        """What may be wrong with this resolved configuration."""
        data, plain = self.data, self.model.pretrain_mode_enable
        keyed = data.layout == "columns" or (data.layout == "auto" and {"data.input_key", "data.output_key"} & self.given.keys())
        return [
            *super().mistakes(),
            *combined(self, "refused", "sft"),
            (keyed and not (data.output_key or data.apply_chat_template or plain),
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


class ReferenceConfig(Section):
    """The reference model."""
    model_name_or_path: str | None = option(None, "Folder or hub name; unset: the model that is trained.", holds="model")
    offload: bool = option(False, "Keep it in CPU memory between uses.", needs="!reference_is_policy")


class DPOReferenceConfig(ReferenceConfig):
    precompute: bool = option(False, "Score all rows once, before the training, and keep the scores beside the checkpoints.")


class DPOModelConfig(shared.ModelConfig):
    loss_type: str = option("dpo", "Loss of a pair; robust, simpo and orpo too.", choices=choices.PREFERENCE_LOSSES)
    ipo_enable: bool = option(False, "The same as loss_type ipo.")
    beta: float = option(0.1, "Strength of the reference; SimPO: scale; ORPO: weight of the odds ratio.", gt=0)
    label_smoothing: float = option(
        0.0, "Part of the labels that are wrong (cDPO, robust).", ge=0, lt=0.5, needs="loss_type=dpo,robust")
    target_margin: float = option(0.5, "Margin of SimPO.", ge=0, needs="loss_type=simpo")
    nll_loss_coef: float = option(0.0, "Weight of the chosen answers' negative log-likelihood.", ge=0)


class ReferencedConfig(SupervisedConfig):
    ref: ReferenceConfig = ReferenceConfig()

    @property
    def needs_reference(self) -> bool:
        """Whether the loss reads a reference."""
        return True

    @property
    def reference_is_policy(self) -> bool:
        """Whether the reference is the trained model with its adapters switched off, not a second
        model.
        """
        return self.ds.lora.rank > 0 and self.ref.model_name_or_path in (None, self.model.model_name_or_path)


class DPOConfig(ReferencedConfig):
    """Direct preference optimization from pairs: DPO, cDPO, IPO, SLiC, robust DPO, SimPO, ORPO."""
    effects: ClassVar[Effects] = EFFECTS["dpo"]

    ckpt: shared.CheckpointConfig = shared.CheckpointConfig(path="./ckpt/checkpoints_dpo")
    logger: shared.LoggerConfig = shared.LoggerConfig(wandb=shared.WandbConfig(project="openrlhf_train_dpo"))
    adam: shared.AdamConfig = shared.AdamConfig(lr=1e-5)
    eval: shared.EvalConfig = shared.EvalConfig(split="test")
    model: DPOModelConfig = DPOModelConfig()
    ref: DPOReferenceConfig = DPOReferenceConfig()
    data: PreferenceDataConfig = PreferenceDataConfig(max_len=512)

    @property
    def needs_reference(self) -> bool:
        """Whether the loss reads a reference."""
        return choices.PREFERENCE_LOSSES[self.model.loss_type]

    def idle_places(self) -> set[str]:
        """The folder of checkpoints, if the run neither writes nor reads there. The scores of the
        reference go there.
        """
        return set() if self.ref.precompute else super().idle_places()

    def derived_values(self) -> dict[str, Any]:
        """The loss that --model.ipo_enable means."""
        return super().derived_values() | ({"model.loss_type": "ipo"} if self.model.ipo_enable else {})

    def mistakes(self) -> Sentences:
        """What may be wrong with this resolved configuration."""
        asked = self.given.get("model.loss_type", "ipo")
        return [
            *super().mistakes(),
            (self.model.ipo_enable and asked != "ipo", f"--model.ipo_enable is not --model.loss_type {asked}: give one of them."),
        ]


class KTOLossConfig(Section):
    """The loss of KTO."""
    beta: float = option(0.01, "Strength of the reference.", gt=0)
    desirable_weight: float = option(1.0, "Weight of desirable answers.", ge=0)
    undesirable_weight: float = option(1.0, "Weight of undesirable answers.", ge=0)


class KTODataConfig(PairColumns, ResponseDataConfig):
    """Tokenizer and data."""
    multiturn: ClassVar[bool] = False
    label_key: str = option("label", "Column with 1 or true for a desirable answer, 0 or false for an undesirable one.")


class KTOConfig(ReferencedConfig):
    """KTO: from answers that are desirable or not."""
    ckpt: shared.CheckpointConfig = shared.CheckpointConfig(path="./ckpt/checkpoints_kto")
    logger: shared.LoggerConfig = shared.LoggerConfig(wandb=shared.WandbConfig(project="openrlhf_train_kto"))
    adam: shared.AdamConfig = shared.AdamConfig(lr=1e-5)
    eval: shared.EvalConfig = shared.EvalConfig(split="test")
    kto: KTOLossConfig = KTOLossConfig()
    data: KTODataConfig = KTODataConfig(input_template="User: {}\nAssistant: ")

    def mistakes(self) -> Sentences:
        """What may be wrong with this resolved configuration."""
        return [
            *super().mistakes(),
            (self.train.batch_size == 1,
             "<train.batch_size> leaves no other answer for KTO's KL, which pairs each prompt with the next row's answer. Use 2 "
             "or more."),
        ]


class KDLossConfig(Section):
    """Distillation."""
    teacher_model: str = required(
        "Folder or hub name of the teacher, or URL of a vLLM server with it. It has the student's vocabulary.", holds="model")
    teacher_offload: bool = option(False, "Keep the teacher in CPU memory between uses.", needs="!served")
    coef: float = option(0.4, "Weight of the teacher; the responses have the rest of 1.", ge=0, le=1)
    top_k: int | None = option(None, "Learn its probabilities of so many tokens only; unset: of all.", ge=1)

    @property
    def served(self) -> bool:
        """Whether a server has the teacher."""
        return rules.has_host(self.teacher_model or "")


class KDConfig(SFTConfig):
    """Knowledge distillation from a teacher."""
    ckpt: shared.CheckpointConfig = shared.CheckpointConfig(path="./ckpt/checkpoints_kd")
    logger: shared.LoggerConfig = shared.LoggerConfig(wandb=shared.WandbConfig(project="openrlhf_train_kd"))
    train: shared.TrainConfig = shared.TrainConfig()
    eval: shared.EvalConfig = shared.EvalConfig(split="test")
    kd: KDLossConfig = KDLossConfig()
    data: SFTDataConfig = SFTDataConfig(input_template="User: {}\nAssistant: ", output_key="output")


class PRMLossConfig(Section):
    """Labels of steps."""
    placeholder_token: str = required("Text after each step, one token.")
    reward_tokens: tuple[str, ...] = option((), "Labels, one token each; for soft labels a right and a wrong one.")


class PRMDataConfig(shared.OfflineDataConfig):
    """Tokenizer and data."""
    input_key: str = option("input", "Column with the text, a placeholder after each step.")
    label_key: str = option("label", "Column with a list of labels: texts, or probabilities of a right step.")


class PRMConfig(SupervisedConfig):
    """Process reward model from labelled steps."""
    effects: ClassVar[Effects] = EFFECTS["prm"]

    ckpt: shared.CheckpointConfig = shared.CheckpointConfig(path="./ckpt/checkpoints_prm")
    logger: shared.LoggerConfig = shared.LoggerConfig(wandb=shared.WandbConfig(project="openrlhf_train_prm"))
    adam: shared.AdamConfig = shared.AdamConfig(lr=1e-6)
    train: shared.TrainConfig = shared.TrainConfig(micro_batch_size=1)
    eval: shared.EvalConfig = shared.EvalConfig(split="test")
    prm: PRMLossConfig = PRMLossConfig()
    data: PRMDataConfig = PRMDataConfig(layout="columns")


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
