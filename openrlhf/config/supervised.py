"""Configurations of the offline commands: flags, defaults, derived values and rules."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, ClassVar

from openrlhf.config import choices, machine, rules, shared, training_rules
from openrlhf.config.commands import Root
from openrlhf.config.flags import Section, Unused, option, required, switch, text_of, unset
from openrlhf.config.optimizer import AdamConfig, OptimizerConfig


class SupervisedConfig(OptimizerConfig, Root):
    """Base class of the offline commands."""

    model: shared.ModelConfig = shared.ModelConfig()
    ds: shared.DeepSpeedConfig = shared.LMDeepSpeedConfig()
    data: shared.OfflineDataConfig = shared.OfflineDataConfig()

    def derived_values(self) -> dict[str, Any]:
        """Return the micro-batch size for small batches, and the text of a chat template file.

        If a rank's share of a batch is smaller than the default micro-batch, the share is one
        micro-batch.
        """
        of_rank = max(1, self.train.batch_size // self.ds.data_slices(machine.world_size()))
        micro = self.train.micro_batch_size
        template = self.data.tokenizer_chat_template
        values = self.unless_given({"train.micro_batch_size": min(micro, of_rank)})
        if rules.is_file(template):
            text = text_of("--data.tokenizer_chat_template", template)
            values["data.tokenizer_chat_template"] = text
        return values

    @property
    def _starts_here(self) -> bool:
        """True if the run will use the current number of processes.

        A dry run or a plan without a launcher describes a run that a launcher will start later.
        """
        describes_later_run = self.dry_run or machine.only_plans
        return bool(os.environ.get("WORLD_SIZE")) or not describes_later_run

    def notices(self) -> Iterator[str]:
        """Yield notices about this resolved configuration."""
        micro = self.train.micro_batch_size
        default = type(self)().train.micro_batch_size
        if micro != default and "train.micro_batch_size" not in self.given:
            yield f"--train.micro_batch_size is {micro}, each rank's share of <train.batch_size>."
        if not self._starts_here:
            yield from training_rules.process_violations(self.ds, machine.world_size())
        yield from training_rules.muon_notices(self, self.given)
        yield from training_rules.held_out_notices(self, "data.dataset", "data.dataset_split")
        yield from super().notices()

    def violations(self) -> Iterator[str]:
        """Yield a sentence for each mistake in this resolved configuration."""
        yield from super().violations()
        yield from training_rules.router_violations(self.model, "model")
        template = self.data.tokenizer_chat_template
        if template and "{" not in template:
            yield (
                "<data.tokenizer_chat_template> is neither a template, which contains {{ or {%, "
                "nor a file on this machine."
            )
        if self._starts_here:
            yield from training_rules.process_violations(self.ds, machine.world_size())
        processes = machine.world_size()
        ranks = self.ds.data_slices(processes)
        yield from training_rules.rank_violations(
            self.train.batch_size,
            ranks,
            micro=self.train.micro_batch_size,
            what=f"the launcher started {ranks}",
        )
        yield from training_rules.partition_violations(
            self.ds, ranks * self.ds.ring_attn_size, what=f"the launcher started {processes}"
        )
        yield from training_rules.optimizer_violations(self, self.ds)
        yield from rules.probability_violations(self, "data.dataset", "data.dataset_probs")


class SFTModelConfig(shared.ModelConfig):
    """The model and the targets of the loss."""

    pretrain_mode_enable: bool = switch("Pretrain on raw text, with every token as a target.")


class ResponseDataConfig(shared.OfflineDataConfig):
    """Tokenizer, prompts and responses."""

    input_key: str = option("input", "Column with the prompt, as text or chat.")
    output_key: str | None = unset("Column with the response; unset: the last turn of the chat.")


class SFTDataConfig(ResponseDataConfig):
    """Tokenizer, prompts or chats, and responses."""

    multiturn: bool = switch("Train on every assistant turn of a chat.")


class SFTConfig(SupervisedConfig):
    """Supervised fine-tuning."""

    ckpt: shared.CheckpointConfig = shared.CheckpointConfig(path="./ckpt/checkpoints_sft")
    logger: shared.LoggerConfig = shared.logger_of("openrlhf_train_sft")
    train: shared.TrainConfig = shared.TrainConfig(max_epochs=2)
    model: SFTModelConfig = SFTModelConfig()
    data: SFTDataConfig = SFTDataConfig(input_template="User: {}\nAssistant: ")

    def derived_values(self) -> dict[str, Any]:
        """Return the derived values. Plain text has no layout."""
        values = super().derived_values()
        if self.model.pretrain_mode_enable:
            values["data.layout"] = "columns"
        return values

    def violations(self) -> Iterator[str]:
        """Yield a sentence for each mistake in this resolved configuration."""
        data = self.data
        keys = {"data.input_key", "data.output_key"}
        yield from super().violations()
        if data.multiturn and not data.apply_chat_template and data.layout == "columns":
            yield "--data.multiturn needs --data.apply_chat_template: only a chat has turns."
        is_keyed = data.layout == "auto" and not keys.isdisjoint(self.given)
        finds_response = (
            data.output_key or data.apply_chat_template or self.model.pretrain_mode_enable
        )
        if (is_keyed or data.layout == "columns") and not finds_response:
            yield (
                "The response column is not set: name it with --data.output_key, or use "
                "--data.apply_chat_template for chats or --model.pretrain_mode_enable for plain "
                "text."
            )

    def unused(self) -> Iterator[Unused]:
        """Yield the flags that have no effect with the current settings."""
        if self.model.pretrain_mode_enable:
            formats = [
                "data.output_key",
                "data.apply_chat_template",
                "data.input_template",
                "data.layout",
                "data.space_before_eos",
            ]
            yield Unused(formats, "with --model.pretrain_mode_enable")
        yield from super().unused()


class PairColumns(Section):
    """Columns of pairs."""

    prompt_key: str | None = unset(
        "Column with the prompt for both answers; unset: the answers contain it."
    )
    chosen_key: str = option("chosen", "Column with the preferred answer or conversation.")
    rejected_key: str = option("rejected", "Column with the rejected answer or conversation.")


class PreferenceDataConfig(PairColumns, shared.OfflineDataConfig):
    """Tokenizer and data."""


class ReferenceConfig(Section):
    """The reference model."""

    model_name_or_path: str | None = unset(
        "Folder or Hub name; unset: same as the trained model.", holds="model"
    )
    offload: bool = switch("Keep the reference in CPU memory between uses.")


class DPOReferenceConfig(ReferenceConfig):
    """The reference model."""

    precompute: bool = switch(
        "Compute the reference's log-probabilities for all rows once before training, and store "
        "them next to the checkpoints.",
    )


class DPOModelConfig(shared.ModelConfig):
    """The model and the preference loss."""

    loss_type: str = option("dpo", "Preference loss.", choices=choices.PREFERENCE_LOSSES)
    ipo_enable: bool = switch("Same as loss_type ipo.")
    beta: float = option(
        0.1,
        "Strength of the KL constraint to the reference; SimPO: reward scale; ORPO: weight of "
        "the odds ratio.",
        gt=0,
    )
    label_smoothing: float = option(
        0.0,
        "Assumed fraction of wrong labels (cDPO, robust).",
        ge=0,
        lt=0.5,
    )
    target_margin: float = option(0.5, "Target reward margin (SimPO).", ge=0)
    nll_loss_coef: float = option(
        0.0, "Weight of the chosen answers' negative log-likelihood.", ge=0
    )

    def unused(self) -> Iterator[Unused]:
        """Yield the flags that have no effect with the current settings."""
        if self.loss_type not in ("dpo", "robust"):
            yield Unused(["label_smoothing"], "without --loss_type dpo or robust")
        if self.loss_type != "simpo":
            yield Unused(["target_margin"], "without --loss_type simpo")


class ReferencedConfig(SupervisedConfig):
    """Base class of commands whose loss compares the model with a reference."""

    ref: ReferenceConfig = ReferenceConfig()

    @property
    def needs_reference(self) -> bool:
        """True if the loss uses a reference."""
        return True

    @property
    def reference_is_policy(self) -> bool:
        """True if the reference is the trained model without its adapters, not a second model."""
        return self.ds.lora.rank > 0 and self.ref.model_name_or_path in (
            None,
            self.model.model_name_or_path,
        )

    def unused(self) -> Iterator[Unused]:
        """Yield the flags that have no effect with the current settings."""
        if not self.needs_reference:
            yield Unused(["ref"], "without a --model.loss_type that uses a reference")
        if self.reference_is_policy:
            yield Unused(
                ["ref.offload"],
                "with --ds.lora.rank, where the reference is the policy without its adapter",
            )
        yield from super().unused()


class DPOConfig(ReferencedConfig):
    """Direct preference optimization from pairs: DPO, cDPO, IPO, SLiC, robust DPO, SimPO, ORPO."""

    ckpt: shared.CheckpointConfig = shared.CheckpointConfig(path="./ckpt/checkpoints_dpo")
    logger: shared.LoggerConfig = shared.logger_of("openrlhf_train_dpo")
    adam: AdamConfig = AdamConfig(lr=1e-5)
    eval: shared.EvalConfig = shared.EvalConfig(split="test")
    model: DPOModelConfig = DPOModelConfig()
    ref: DPOReferenceConfig = DPOReferenceConfig()
    data: PreferenceDataConfig = PreferenceDataConfig(max_len=512)

    @property
    def needs_reference(self) -> bool:
        """True if the loss uses a reference."""
        return choices.PREFERENCE_LOSSES[self.model.loss_type].needs_reference

    def idle_places(self) -> set[str]:
        """Return the checkpoint folder if the run neither writes nor reads it.

        This folder also stores precomputed reference log-probabilities.
        """
        if self.ref.precompute:
            return set()
        return super().idle_places()

    def derived_values(self) -> dict[str, Any]:
        """Return the derived values, including the loss that --model.ipo_enable selects."""
        values = super().derived_values()
        if self.model.ipo_enable:
            values["model.loss_type"] = "ipo"
        return values

    def violations(self) -> Iterator[str]:
        """Yield a sentence for each mistake in this resolved configuration."""
        yield from super().violations()
        asked = self.given.get("model.loss_type", "ipo")
        if self.model.ipo_enable and asked != "ipo":
            yield (
                f"--model.ipo_enable (--model.loss_type ipo) and --model.loss_type {asked} "
                "contradict each other: leave one of them out."
            )


class KTOLossConfig(Section):
    """KTO loss."""

    beta: float = option(0.01, "Strength of the KL constraint to the reference.", gt=0)
    desirable_weight: float = option(1.0, "Weight of desirable answers.", ge=0)
    undesirable_weight: float = option(1.0, "Weight of undesirable answers.", ge=0)


class KTODataConfig(PairColumns, ResponseDataConfig):
    """Tokenizer and data."""

    multiturn: ClassVar[bool] = False
    label_key: str = option(
        "label", "Column with 1 or true for a desirable answer, 0 or false for an undesirable one."
    )


class KTOConfig(ReferencedConfig):
    """KTO: preference optimization from answers labeled desirable or undesirable."""

    ckpt: shared.CheckpointConfig = shared.CheckpointConfig(path="./ckpt/checkpoints_kto")
    logger: shared.LoggerConfig = shared.logger_of("openrlhf_train_kto")
    adam: AdamConfig = AdamConfig(lr=1e-5)
    eval: shared.EvalConfig = shared.EvalConfig(split="test")
    kto: KTOLossConfig = KTOLossConfig()
    data: KTODataConfig = KTODataConfig(input_template="User: {}\nAssistant: ")

    def violations(self) -> Iterator[str]:
        """Yield a sentence for each mistake in this resolved configuration."""
        yield from super().violations()
        if self.train.batch_size == 1:
            yield (
                "<train.batch_size> is too small for KTO's KL estimate, which pairs each prompt "
                "with the answer of the next row. Use 2 or more."
            )


class KDLossConfig(Section):
    """Distillation."""

    teacher_model: str = required(
        "Folder or Hub name of the teacher, or URL of its vLLM server. The teacher and the "
        "student must have the same vocabulary.",
        holds="model",
    )
    teacher_offload: bool = switch("Keep the teacher in CPU memory between uses.")
    coef: float = option(
        0.4,
        "Weight of the distillation loss; the loss on the responses has 1 minus this weight.",
        ge=0,
        le=1,
    )
    top_k: int | None = unset(
        "Number of the teacher's most likely tokens to learn from; unset: all.", ge=1
    )

    @property
    def served(self) -> bool:
        """True if the teacher runs on a server."""
        return rules.has_host(self.teacher_model or "")

    def unused(self) -> Iterator[Unused]:
        """Yield the flags that have no effect with the current settings."""
        if self.served:
            yield Unused(["teacher_offload"], "with --teacher_model URL")


class KDConfig(SFTConfig):
    """Knowledge distillation from a teacher."""

    ckpt: shared.CheckpointConfig = shared.CheckpointConfig(path="./ckpt/checkpoints_kd")
    logger: shared.LoggerConfig = shared.logger_of("openrlhf_train_kd")
    train: shared.TrainConfig = shared.TrainConfig()
    eval: shared.EvalConfig = shared.EvalConfig(split="test")
    kd: KDLossConfig = KDLossConfig()
    data: SFTDataConfig = SFTDataConfig(input_template="User: {}\nAssistant: ", output_key="output")

    def violations(self) -> Iterator[str]:
        """Yield a sentence for each mistake in this resolved configuration."""
        yield from super().violations()
        if self.kd.served and not self.kd.top_k:
            yield (
                "<kd.teacher_model> is a server, which returns only the probabilities of its top "
                "tokens. Set how many with --kd.top_k, e.g. 20."
            )


class PRMLossConfig(Section):
    """Step labels."""

    placeholder_token: str = required("Text after each step; must be a single token.")
    reward_tokens: tuple[str, ...] = option(
        (),
        "Labels, each a single token; with soft labels, the tokens for correct and incorrect "
        "steps.",
    )


class PRMDataConfig(shared.OfflineDataConfig):
    """Tokenizer and data."""

    input_key: str = option("input", "Column with text that has a placeholder after each step.")
    label_key: str = option(
        "label", "Column with a list of labels: texts, or probabilities that the step is correct."
    )


class PRMConfig(SupervisedConfig):
    """Process reward model from labeled steps."""

    ckpt: shared.CheckpointConfig = shared.CheckpointConfig(path="./ckpt/checkpoints_prm")
    logger: shared.LoggerConfig = shared.logger_of("openrlhf_train_prm")
    adam: AdamConfig = AdamConfig(lr=1e-6)
    train: shared.TrainConfig = shared.TrainConfig(micro_batch_size=1)
    eval: shared.EvalConfig = shared.EvalConfig(split="test")
    prm: PRMLossConfig = PRMLossConfig()
    data: PRMDataConfig = PRMDataConfig(layout="columns")

    def unused(self) -> Iterator[Unused]:
        """Yield the flags that have no effect with the current settings."""
        formats = [
            "data.input_template",
            "data.apply_chat_template",
            "data.tokenizer_chat_template",
            "data.layout",
            "data.space_before_eos",
        ]
        yield Unused(formats, "with this command")
        yield from super().unused()


class RMModelConfig(shared.ModelConfig):
    """The model and the pairwise loss."""

    loss_type: str = option(
        "sigmoid", "Pairwise loss; both names select the same loss.", choices=("sigmoid", "logexp")
    )
    margin_loss_enable: bool = switch(
        "Use the column margin as the required reward margin (sigmoid).",
    )
    compute_fp32_loss_enable: bool = switch("No effect: rewards are always float32.", obsolete=True)
    reinit_head: bool = switch("Initialize a new scalar head even if one is stored.")

    def unused(self) -> Iterator[Unused]:
        """Yield the flags that have no effect with the current settings."""
        if self.loss_type == "logexp":
            yield Unused(["margin_loss_enable"], "with --loss_type logexp")


class RMDeepSpeedConfig(shared.ScalarHeadConfig, shared.DeepSpeedConfig):
    """DeepSpeed, and the name of the scalar head."""


class RMConfig(SupervisedConfig):
    """Reward model from preference pairs."""

    measures_training_rows: ClassVar[bool] = True

    ckpt: shared.CheckpointConfig = shared.CheckpointConfig(path="./ckpt/checkpoints_rm")
    logger: shared.LoggerConfig = shared.logger_of("openrlhf_train_rm")
    adam: AdamConfig = AdamConfig(lr=9e-6)
    train: shared.TrainConfig = shared.TrainConfig(micro_batch_size=1)
    model: RMModelConfig = RMModelConfig()
    ds: RMDeepSpeedConfig = RMDeepSpeedConfig()
    data: PreferenceDataConfig = PreferenceDataConfig(max_len=512)
