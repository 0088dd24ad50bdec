"""Roots of the offline commands: their own flags and defaults, derived values, rules."""

# ruff: noqa: RUF009  (defaults that are frozen dataclasses cannot be changed)
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from openrlhf.config import machine
from openrlhf.config.flags import option
from openrlhf.config.rules import (
    SHARED_DERIVATIONS,
    SHARED_RULES,
    Derivation,
    Derived,
    Request,
    Rule,
    batch_fits_ranks,
    derive,
    muon_notice,
    probabilities,
    violations,
)
from openrlhf.config.shared import (
    CheckpointConfig,
    EngineConfig,
    LMEngineConfig,
    LoggerConfig,
    ModelConfig,
    OfflineDataConfig,
    OptimizerConfig,
    RootConfig,
    TrainConfig,
    WandbConfig,
)


@dataclass(frozen=True, kw_only=True)
class SupervisedConfig(OptimizerConfig, RootConfig):
    """What the offline commands share; a root adds to the two lists of functions."""

    derivations: ClassVar[tuple[Derivation[Any], ...]] = ()
    rules: ClassVar[tuple[Rule[Any], ...]] = ()

    model: ModelConfig = ModelConfig()
    ds: EngineConfig = EngineConfig()
    data: OfflineDataConfig = OfflineDataConfig()

    def resolve(
        self, explicit: frozenset[str] = frozenset(), *, command: str = ""
    ) -> tuple[Self, list[str]]:
        """A copy with all derived values, and notices. `explicit`: the paths the user gave."""
        request = Request(command=command or type(self).__name__, explicit=explicit)
        steps = [*self.derivations, *OFFLINE_DERIVATIONS, *SHARED_DERIVATIONS]
        return derive(self, steps, request)

    def check(self) -> list[str]:
        """What is wrong, one sentence each; for a resolved configuration."""
        return violations(self, [*SHARED_RULES, *OFFLINE_RULES, *self.rules])


# Derived values and rules of every offline command


def micro_batch_within_batch(config: SupervisedConfig, request: Request) -> Derived | None:
    """The default micro-batch of a small batch is the batch."""
    group = config.ds.ring_attn_size * config.ds.tensor_parallel_size
    share = max(1, config.train.batch_size // max(1, machine.world_size() // group))
    if "train.micro_batch_size" in request.explicit or share >= config.train.micro_batch_size:
        return None
    return Derived(
        values={"train.micro_batch_size": share},
        notice=f"--train.micro_batch_size is {share}: a rank has no more of --train.batch_size "
        f"{config.train.batch_size}.",
    )


def chat_template_unused(config: SupervisedConfig, request: Request) -> Derived | None:
    """A chat template needs the switch that applies it."""
    if config.data.tokenizer_chat_template is None or config.data.apply_chat_template:
        return None
    return Derived(
        notice="--data.tokenizer_chat_template has no effect without --data.apply_chat_template."
    )


def muon_of_model(config: SupervisedConfig, request: Request) -> Derived | None:
    """What Muon ignores."""
    return muon_notice("", config)


def ring_attention_is_packed(config: SupervisedConfig) -> str | None:
    """Ring attention cuts packed rows."""
    if config.ds.ring_attn_size == 1 or config.ds.packing_samples:
        return None
    return f"--ds.ring_attn_size {config.ds.ring_attn_size} needs --ds.packing_samples."


def batch_fits_launcher(config: SupervisedConfig) -> Iterator[str]:
    """The batch divides over the processes the launcher started."""
    ranks = machine.world_size()
    what = f"the launcher started {ranks}"
    yield from batch_fits_ranks(config, ranks, micro=config.train.micro_batch_size, what=what)


OFFLINE_DERIVATIONS: tuple[Derivation[Any], ...] = (
    micro_batch_within_batch,
    chat_template_unused,
    muon_of_model,
)

OFFLINE_RULES: tuple[Rule[Any], ...] = (
    ring_attention_is_packed,
    batch_fits_launcher,
    probabilities("data.dataset", "data.dataset_probs"),
)


# SFT


@dataclass(frozen=True, kw_only=True)
class SFTModelConfig(ModelConfig):
    """The model to train."""

    pretrain_mode_enable: bool = option(
        False, help="Continued pretraining: raw text, every token is a target."
    )


@dataclass(frozen=True, kw_only=True)
class SFTDataConfig(OfflineDataConfig):
    """Tokenizer and data."""

    multiturn: bool = option(False, help="Learn every assistant turn of a chat.")
    input_key: str = option("input", help="Column with the prompt, text or chat.")
    output_key: str | None = option(
        None, help="Column with the response; unset: the chat's last turn."
    )


def multiturn_has_template(config: SFTConfig) -> str | None:
    """Turns exist in chats only."""
    if not config.data.multiturn or config.data.apply_chat_template:
        return None
    return "--data.multiturn needs --data.apply_chat_template: turns are those of a chat."


def response_has_a_source(config: SFTConfig) -> str | None:
    """Without chat and without a second column there is nothing to learn."""
    data = config.data
    if data.output_key or data.apply_chat_template or config.model.pretrain_mode_enable:
        return None
    return (
        "The response is nowhere: name its column with --data.output_key, or use "
        "--data.apply_chat_template for chats, or --model.pretrain_mode_enable for plain text."
    )


@dataclass(frozen=True, kw_only=True)
class SFTConfig(SupervisedConfig):
    """Supervised fine-tuning."""

    run_name_prefix: ClassVar[str] = "sft_"
    rules: ClassVar[tuple[Rule[Any], ...]] = (multiturn_has_template, response_has_a_source)

    ckpt: CheckpointConfig = CheckpointConfig(path="./ckpt/checkpoints_sft")
    logger: LoggerConfig = LoggerConfig(wandb=WandbConfig(project="openrlhf_train_sft"))
    train: TrainConfig = TrainConfig(max_epochs=2)
    model: SFTModelConfig = SFTModelConfig()
    ds: LMEngineConfig = LMEngineConfig()
    data: SFTDataConfig = SFTDataConfig(input_template="User: {}\nAssistant: ")
