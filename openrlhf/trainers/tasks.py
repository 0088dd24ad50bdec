"""Offline tasks by name: `openrlhf sft` trains the task "sft".

The name of a plug-in's task is a verb too.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Generic, Protocol, TypeVar

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
from openrlhf.observability.metrics import Mean, Metric
from openrlhf.training.strategy import FrozenModel, Strategy
from openrlhf.workers.base import MicroBatchLimits, balancing_term

Config = TypeVar("Config", bound=SupervisedConfig)
Row = TypeVar("Row")
Micro = TypeVar("Micro", bound=Ragged)
Kind = TypeVar("Kind", bound="type[OfflineTask[Any, Any, Any]]")


class Rows(Protocol):
    """A dataset of tokenized rows; `summary` describes the dataset in a sentence."""

    @property
    def summary(self) -> str: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class OfflineTask(ABC, Generic[Config, Row, Micro]):
    """One offline stage: its flags, rows, models, loss and metrics."""

    name: ClassVar[str] = ""  # the verb, set by `offline_task`
    root: ClassVar[type[SupervisedConfig]] = SFTConfig  # the flags
    padding_side: ClassVar[str] = "right"
    rows_per_group: ClassVar[int] = 1  # neighbouring rows of a batch that share a micro-batch
    # Flags that define the loss. A resumed run must have the same values.
    objective: ClassVar[tuple[str, ...]] = ("model.aux_loss_coef",)
    stores_numbers: ClassVar[bool] = False  # True if `evaluated` stores numbers in the model
    # Titles in --dry_run of the samples that `collate` makes of one row; "" leaves a sample out.
    sample_names: ClassVar[tuple[str, ...]] = ("text",)

    def __init__(self, config: Config) -> None:
        self.config = config
        # The models of `frozen_models`, which are loaded before training begins.
        self.frozen: Mapping[str, FrozenModel] = {}

    @abstractmethod
    def rows(self, dataset: Table, tokenizer: PreTrainedTokenizerBase) -> Rows:
        """Return the rows of a dataset, tokenized."""

    def check_model(self) -> None:
        """Raise ModelError if the stored configuration is of the wrong kind of model.

        Reads no weights.
        """
        configuration(load_spec(self.config))

    @abstractmethod
    def load_model(self) -> nn.Module:
        """Load the model to train. Its submodule `hf` is exported."""

    def frozen_paths(self) -> dict[str, str | None]:
        """Return the paths of the frozen language models, by the flags that name the models.

        None stands for the trained model as it is before training.
        """
        return {}

    def frozen_models(self) -> dict[str, Callable[[], nn.Module]]:
        """Return functions that load the frozen models, by the flags that name the models."""
        return {}

    @property
    def precomputes(self) -> bool:
        """True if the frozen models score all rows before training and are freed after that."""
        return False

    @property
    def offloads(self) -> bool:
        """True if the frozen models are in CPU memory except during the first pass of a step."""
        return False

    @abstractmethod
    def collate(self, rows: Sequence[Row]) -> Micro:
        """Return rows of the dataset as one ragged batch."""

    def of_window(self, rows: Sequence[Row], strategy: Strategy) -> Sequence[Row]:
        """Return this rank's rows of an optimizer step or of an evaluation. Collective.

        A task may change a row with data from the rows of other ranks.
        """
        return rows

    def micro_batches(self, batch: Micro, limits: MicroBatchLimits) -> list[Micro]:
        """Split a batch. A limit on rows counts groups of `rows_per_group` rows."""
        size = self.rows_per_group
        longest = batch.lengths.view(-1, size).amax(1)  # of each group
        partition: list[list[int]] = []
        for groups in limits.cut(longest):
            rows: list[int] = []
            for group in groups:
                rows += range(size * group, size * (group + 1))
            partition.append(rows)
        return batch.split(partition)

    def before(self, model: Any, micro: Micro) -> tuple[Micro, Mapping[str, float]]:
        """Process a micro-batch in the first pass over an optimizer step, without gradient.

        The first pass sees every micro-batch of the step before the first loss. Returns the
        micro-batch, perhaps with more columns (log-probabilities of a frozen model), and numbers.
        The sums of these numbers over the whole window and all ranks are among the totals of
        `loss`. Every micro-batch must run the same forwards, because forwards are collective under
        ZeRO 3.
        """
        return micro, {}

    @property
    def has_first_pass(self) -> bool:
        """True if `before` may run a model."""
        return type(self).before is not OfflineTask.before

    @abstractmethod
    def counts(self, micro: Micro) -> Mapping[str, float]:
        """Return the denominators of a micro-batch.

        `loss` gets their sums over the window and all ranks in `totals`.
        """

    @abstractmethod
    def loss(
        self, model: Any, micro: Micro, totals: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Metric]]:
        """Return the micro-batch's part of the window's loss, and its metrics by logged name."""

    def share(
        self,
        summed: Tensor,
        aux_loss: Tensor | None,
        seen: float,
        total: float,
        metrics: dict[str, Metric],
    ) -> tuple[Tensor, dict[str, Metric]]:
        """Return what `loss` returns: the summed loss ÷ `total`, and the metrics.

        Adds the load-balancing term of a mixture of experts to the loss, and the loss under one
        name for all tasks to the metrics. `seen` is the micro-batch's part of the denominator
        `total`.
        """
        balance, balance_metrics = balancing_term(aux_loss, self.config.model.aux_loss_coef, seen)
        minimised = {"train/loss_mean": Mean(float(summed.detach()), seen)}
        return (summed + balance) / total, metrics | minimised | balance_metrics

    @abstractmethod
    def evaluation_names(self, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        """Return the logged metrics of an evaluation, from the metrics of all its rows."""

    def text_format(self, tokenizer: PreTrainedTokenizerBase, ending: str) -> TextFormat | None:
        """Return the format of prompts in training, which is stored with the model.

        Returns None if the flags do not define it.
        """
        return TextFormat.of(self.config.data, tokenizer, ending=ending)

    def prompt_column(self, dataset: Table) -> str | None:
        """Return the column of the prompts that are put into a template.

        Returns None if the rows have no such column.
        """
        return getattr(self.config.data, "input_key", None)

    def look_at_rows(self, train_rows: Rows) -> list[Finding]:
        """Return findings about the training rows as a whole; none by default."""
        return []

    def measured_rows(self, train_rows: Rows) -> Any:
        """Return the rows to evaluate without --eval.dataset.

        Returns None by default: no evaluation.
        """
        return None

    def evaluated(self, model: nn.Module, numbers: Mapping[str, float]) -> None:
        """Receive the numbers of an evaluation. A task may store some of them in the model.

        Called in every process with the same numbers.
        """


class LanguageTask(OfflineTask[Config, Row, Micro]):
    """A task that trains a language model, perhaps beside frozen ones."""

    model_class: ClassVar[type[PolicyModel]] = PolicyModel

    def check_model(self) -> None:
        """Raise ModelError unless all models are complete language models that can be trained."""
        check_causal_lm(trained_spec(self.config))
        for path in set(self.frozen_paths().values()) - {None}:
            check_causal_lm(load_spec(self.config, path))

    def load_model(self) -> PolicyModel:
        """Load a causal language model."""
        balancing = self.config.model.aux_loss_coef > 0
        return self.model_class.load(trained_spec(self.config), balancing=balancing)

    def frozen_models(self) -> dict[str, Callable[[], nn.Module]]:
        """Return functions that load the models of `frozen_paths`, by the flags that name them."""
        loaders: dict[str, Callable[[], nn.Module]] = {}
        for name, path in self.frozen_paths().items():
            loaders[name] = partial(self.model_class.load, load_spec(self.config, path))
        return loaders


OFFLINE_TASKS: Registry[type[OfflineTask[Any, Any, Any]]] = Registry("offline task")


def offline_task(name: str) -> Callable[[Kind], Kind]:
    """Return a decorator that registers a task: `openrlhf <name> …` trains it."""

    def decorate(task: Kind) -> Kind:
        OFFLINE_TASKS.add(name, task)
        task.name = name
        return task

    return decorate


def load_spec(config: SupervisedConfig, path: str | None = None) -> LoadSpec:
    """Return the settings for loading the model at `path`, or the one before training."""
    return LoadSpec.of(config, path or config.model.model_name_or_path)


def trained_spec(config: SupervisedConfig) -> LoadSpec:
    """Return the settings for loading the model to train, with adapters if the flags set them."""
    return load_spec(config).trained(config.model, config.ds.lora, config.train.seed)
