"""Offline tasks by name.

For example, `openrlhf sft` trains the task "sft". A task registered by a plug-in also becomes a
command.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from openrlhf.algorithms.registry import Registry
from openrlhf.checks import Finding
from openrlhf.config.supervised import SFTConfig, SupervisedConfig
from openrlhf.core.batches import Ragged
from openrlhf.data.first_look import TextFormat
from openrlhf.data.loading import Table
from openrlhf.models.loading import LoadSpec, check_causal_lm, configuration
from openrlhf.models.policy import PolicyModel
from openrlhf.observability.metrics import Metric
from openrlhf.training.strategy import FrozenModel, Strategy
from openrlhf.workers.base import MicroBatchLimits, balancing_term, mean_of

Config = TypeVar("Config", bound=SupervisedConfig)
Row = TypeVar("Row")
Micro = TypeVar("Micro", bound=Ragged)
Kind = TypeVar("Kind", bound="type[OfflineTask[Any, Any, Any]]")


class Rows(Protocol):
    """A dataset of tokenized rows."""

    @property
    def summary(self) -> str:
        """A sentence that describes the dataset."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class OfflineTask(ABC, Generic[Config, Row, Micro]):
    """An offline training task: its flags, rows, models, loss and metrics."""

    name: ClassVar[str] = ""  # the command's name, set by `offline_task`
    root: ClassVar[type[SupervisedConfig]] = SFTConfig  # the configuration class with the flags
    padding_side: ClassVar[str] = "right"
    rows_per_unit: ClassVar[int] = 1  # number of consecutive rows that must share a micro-batch
    # Flags that define the loss and must have the same values in a resumed run.
    objective: ClassVar[tuple[str, ...]] = ("model.aux_loss_coef",)
    stores_numbers: ClassVar[bool] = False  # True if `evaluated` stores numbers in the model
    # Titles in --dry_run for the samples that `collate` creates from a row; "" hides a sample.
    sample_names: ClassVar[tuple[str, ...]] = ("text",)

    def __init__(self, config: Config) -> None:
        self.config = config
        # The models from `frozen_models`, loaded before training begins.
        self.frozen: Mapping[str, FrozenModel] = {}

    @abstractmethod
    def rows(self, dataset: Table, tokenizer: PreTrainedTokenizerBase) -> Rows:
        """Return the tokenized rows of a dataset."""

    def check_model(self) -> None:
        """Raise ModelError if the stored configuration belongs to the wrong kind of model.

        Does not read weights.
        """
        configuration(load_spec(self.config))

    @abstractmethod
    def load_model(self) -> nn.Module:
        """Load the model to train. Exports use the model's submodule `hf`."""

    def frozen_paths(self) -> dict[str, str | None]:
        """Return the paths of the frozen language models, keyed by the flags that name them.

        If a path is None, the frozen model is a copy of the model before training.
        """
        return {}

    def frozen_models(self) -> dict[str, Callable[[], nn.Module]]:
        """Return functions that load the frozen models, keyed by the flags that name them."""
        return {}

    @property
    def precomputes(self) -> bool:
        """True if the frozen models score all rows before training and are then freed."""
        return False

    @property
    def offloads(self) -> bool:
        """True if the frozen models stay in CPU memory except during the first pass of a step."""
        return False

    @abstractmethod
    def collate(self, rows: Sequence[Row]) -> Micro:
        """Return dataset rows as one ragged batch."""

    def of_window(self, rows: Sequence[Row], strategy: Strategy) -> Sequence[Row]:
        """Return this rank's rows of an optimizer step or an evaluation. Collective.

        A task may add data from other ranks' rows to a row.
        """
        return rows

    def micro_batches(self, batch: Micro, limits: MicroBatchLimits) -> list[Micro]:
        """Split a batch. Row limits count units of `rows_per_unit` rows."""
        rows = torch.arange(batch.num_rows).view(-1, self.rows_per_unit)  # the rows of each unit
        longest = batch.lengths[rows].amax(1)
        return [batch.select(rows[units].flatten()) for units in limits.cut(longest)]

    def before(self, model: Any, micro: Micro) -> tuple[Micro, Mapping[str, float]]:
        """Process a micro-batch in the first pass over an optimizer step, without gradient.

        The first pass processes all micro-batches of the step before any loss is computed. Returns
        the micro-batch, optionally with more columns (log-probabilities of a frozen model), and a
        dict of numbers. These numbers are summed over the entire window and all ranks, and passed
        to `loss` in `totals`. Every micro-batch must run the same forward passes, because forward
        passes are collective under ZeRO 3.
        """
        return micro, {}

    @property
    def has_first_pass(self) -> bool:
        """True if `before` may run a model."""
        return type(self).before is not OfflineTask.before

    @abstractmethod
    def counts(self, micro: Micro) -> Mapping[str, float]:
        """Return the denominators of a micro-batch.

        The sums of the denominators over the window and all ranks are passed to `loss` in `totals`.
        """

    @abstractmethod
    def loss(
        self, model: Any, micro: Micro, totals: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Metric]]:
        """Return the micro-batch's contribution to the window's loss, and its metrics by name."""

    def share(
        self,
        summed: Tensor,
        aux_loss: Tensor | None,
        seen: float,
        total: float,
        metrics: dict[str, Metric],
    ) -> tuple[Tensor, dict[str, Metric]]:
        """Return the result of `loss`: the summed loss ÷ `total`, and the metrics.

        For a mixture of experts, the load-balancing term is added to the loss. The metrics also
        include the loss under a name shared by all tasks. `seen` is the micro-batch's contribution
        to the denominator `total`.
        """
        balance, balance_metrics = balancing_term(aux_loss, self.config.model.aux_loss_coef, seen)
        minimised = {"train/loss_mean": mean_of(summed, seen)}
        return (summed + balance) / total, metrics | minimised | balance_metrics

    @abstractmethod
    def evaluation_names(self, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        """Return an evaluation's metrics by logged name, given the metrics of its rows."""

    def text_format(self, tokenizer: PreTrainedTokenizerBase, ending: str) -> TextFormat | None:
        """Return the prompt format used in training, which is stored with the model.

        Returns None if the flags do not define a format.
        """
        if not self.has_format():
            return None
        return TextFormat.of(self.config.data, tokenizer, ending=ending)

    def has_format(self) -> bool:
        """Return whether the flags define the format of the prompts."""
        return True

    def prompt_column(self, dataset: Table) -> str | None:
        """Return the column of prompts to insert into a template, or None if there is none."""
        return getattr(self.config.data, "input_key", None)

    def look_at_rows(self, train_rows: Rows) -> list[Finding]:
        """Return findings about the training rows as a whole. By default, there are no findings."""
        return []

    def measured_rows(self, train_rows: Rows) -> Any:
        """Return the rows to evaluate if --eval.dataset is not set.

        By default, return None, which disables evaluation.
        """
        return None

    def evaluated(self, model: nn.Module, numbers: Mapping[str, float]) -> None:
        """Receive the results of an evaluation.

        A task may store some results in the model. Every process calls this method with the same
        results.
        """


class LanguageTask(OfflineTask[Config, Row, Micro]):
    """A task that trains a language model, optionally with frozen models."""

    model_class: ClassVar[type[PolicyModel]] = PolicyModel

    def check_model(self) -> None:
        """Raise ModelError unless all models are complete causal LMs that can be trained."""
        check_causal_lm(trained_spec(self.config))
        for path in set(self.frozen_paths().values()) - {None}:
            check_causal_lm(load_spec(self.config, path))

    def load_model(self) -> PolicyModel:
        """Load the causal language model to train."""
        balancing = self.config.model.aux_loss_coef > 0
        return self.model_class.load(trained_spec(self.config), balancing=balancing)

    def frozen_models(self) -> dict[str, Callable[[], nn.Module]]:
        """Return functions that load the models in `frozen_paths`, keyed by their flags."""
        loaders: dict[str, Callable[[], nn.Module]] = {}
        for name, path in self.frozen_paths().items():
            loaders[name] = partial(self.model_class.load, load_spec(self.config, path))
        return loaders


OFFLINE_TASKS: Registry[type[OfflineTask[Any, Any, Any]]] = Registry("offline task")


def offline_task(name: str) -> Callable[[Kind], Kind]:
    """Return a decorator that registers a task for the command `openrlhf <name>`."""

    def decorate(task: Kind) -> Kind:
        OFFLINE_TASKS.add(name, task)
        task.name = name
        return task

    return decorate


def load_spec(config: SupervisedConfig, path: str | None = None) -> LoadSpec:
    """Return the settings for loading the model at `path`, by default the initial model."""
    return LoadSpec.of(config, path or config.model.model_name_or_path)


def trained_spec(config: SupervisedConfig) -> LoadSpec:
    """Return the settings for loading the model to train, including its adapters if any."""
    return load_spec(config).trained(config.model, config.ds.lora, config.train.seed)
