"""Offline tasks by name. `openrlhf sft` trains the task "sft"; a plug-in's task is a verb too."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, TypeVar

from torch import nn
from transformers import PreTrainedTokenizerBase

from openrlhf.algorithms.registry import Registry
from openrlhf.config.supervised import SFTConfig, SupervisedConfig
from openrlhf.data.loading import Table
from openrlhf.models.loading import LoadSpec
from openrlhf.trainers.supervised import Micro, Row, Rows, Task
from openrlhf.workers.base import MicroBatchLimits

Config = TypeVar("Config", bound=SupervisedConfig)
Kind = TypeVar("Kind", bound="type[OfflineTask[Any, Any, Any]]")


class OfflineTask(Task[Row, Micro], Generic[Config, Row, Micro]):
    """A task with what its command needs besides: its flags, its rows and its model."""

    root: ClassVar[type[SupervisedConfig]] = SFTConfig  # the flags
    padding_side: ClassVar[str] = "right"

    def __init__(self, config: Config) -> None:
        self.config = config

    @abstractmethod
    def rows(self, dataset: Table, tokenizer: PreTrainedTokenizerBase) -> Rows:
        """The rows of a dataset, tokenised."""

    @abstractmethod
    def load_model(self) -> nn.Module:
        """The model to train; its submodule `hf` is exported."""

    def micro_batches(self, batch: Micro, limits: MicroBatchLimits) -> list[Micro]:
        """Any row may go with any other."""
        return batch.split(limits.cut(batch.lengths))

    def measured_rows(self, train_rows: Rows) -> Rows | None:
        """What is evaluated where no --eval.dataset is given: nothing."""
        return None

    def evaluated(self, model: nn.Module, numbers: Mapping[str, float]) -> None:
        """Nothing to keep with the model."""


OFFLINE_TASKS: Registry[type[OfflineTask[Any, Any, Any]]] = Registry("offline task")


def offline_task(name: str) -> Callable[[Kind], Kind]:
    """A decorator that registers a task: `openrlhf <name> …` trains it."""

    def decorate(task: Kind) -> Kind:
        OFFLINE_TASKS.add(name, task)
        return task

    return decorate


def load_spec(config: SupervisedConfig) -> LoadSpec:
    """How the flags ask for the model."""
    return LoadSpec(
        path=config.model.model_name_or_path,
        param_dtype=config.ds.param_dtype,
        attention=config.ds.attn_implementation,
        packing=config.ds.packing_samples,
        gradient_checkpointing=config.model.gradient_checkpointing_enable,
        reentrant=config.model.gradient_checkpointing_reentrant,
        trust_remote_code=config.model.trust_remote_code,
    )
