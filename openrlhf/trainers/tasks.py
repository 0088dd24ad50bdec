"""Offline tasks by name. `openrlhf sft` trains the task "sft"; the name of a plug-in's task is a
verb too.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from openrlhf.algorithms.registry import Registry
from openrlhf.config.supervised import SFTConfig, SupervisedConfig
from openrlhf.core.batches import Ragged
from openrlhf.data.findings import Finding
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
    rows_per_group: ClassVar[int] = 1  # neighbouring rows of a batch that stay in one micro-batch
    objective: ClassVar[tuple[str, ...]] = (
        "model.aux_loss_coef",
    )  # flags; a resumed run needs the same values
    stores_numbers: ClassVar[bool] = False  # whether `evaluated` stores numbers in the model
    sample_names: ClassVar[tuple[str, ...]] = (
        "text",
    )  # the samples of a row in a batch; "": --dry_run leaves it out

    def __init__(self, config: Config) -> None:
        self.config = config
        self.frozen: Mapping[
            str, FrozenModel
        ] = {}  # the models of `frozen_models`, loaded before training begins

    @abstractmethod
    def rows(self, dataset: Table, tokenizer: PreTrainedTokenizerBase) -> Rows:
        """The rows of a dataset, tokenized."""

    def check_model(self) -> None:
        """Raise ModelError if the stored configuration is of the wrong kind of model. Reads no
        weights.
        """
        configuration(load_spec(self.config))

    @abstractmethod
    def load_model(self) -> nn.Module:
        """The model to train. Its submodule `hf` is exported."""

    def frozen_paths(self) -> dict[str, str | None]:
        """The frozen language models, by the flags that name them; None is the trained model as it
        begins.
        """
        return {}

    def frozen_models(self) -> dict[str, Callable[[], nn.Module]]:
        """Functions that load the models needed besides the trained model, by their flags."""
        return {}

    @property
    def precomputes(self) -> bool:
        """Whether the rows get what the frozen models say of them before the training, and the
        models go.
        """
        return False

    @property
    def offloads(self) -> bool:
        """Whether the frozen models are in CPU memory but for the first pass over an optimizer
        step.
        """
        return False

    @abstractmethod
    def collate(self, rows: Sequence[Row]) -> Micro:
        """Rows of the dataset as one ragged batch."""

    def of_window(self, rows: Sequence[Row], strategy: Strategy) -> Sequence[Row]:
        """This rank's rows of an optimizer step, or of an evaluation, perhaps changed by the rows
        of the others. Collective.
        """
        return rows

    def micro_batches(self, batch: Micro, limits: MicroBatchLimits) -> list[Micro]:
        """The batch in parts. A limit of rows counts groups of `rows_per_group` rows."""
        size, cut = (
            self.rows_per_group,
            limits.cut(batch.lengths.view(-1, self.rows_per_group).amax(1)),
        )
        return batch.split(
            [[size * group + row for group in part for row in range(size)] for part in cut]
        )

    def before(self, model: Any, micro: Micro) -> tuple[Micro, Mapping[str, float]]:
        """A first pass over every micro-batch of an optimizer step, without gradient, before the
        first loss.

        Returns the micro-batch, perhaps with more columns (log-probabilities of a frozen model),
        and numbers. The sums of these numbers over the whole window and all ranks are among the
        totals of `loss`. Every micro-batch must run the same forwards, because forwards are
        collective under ZeRO 3.
        """
        return micro, {}

    @property
    def has_first_pass(self) -> bool:
        """True if `before` may run a model."""
        return type(self).before is not OfflineTask.before

    @abstractmethod
    def counts(self, micro: Micro) -> Mapping[str, float]:
        """The denominators of a micro-batch. `loss` gets their sums over the window and all ranks
        in `totals`.
        """

    @abstractmethod
    def loss(
        self, model: Any, micro: Micro, totals: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Metric]]:
        """The micro-batch's part of the window's loss, and its metrics under their logged names."""

    def share(
        self,
        summed: Tensor,
        aux_loss: Tensor | None,
        seen: float,
        total: float,
        metrics: dict[str, Metric],
    ) -> tuple[Tensor, dict[str, Metric]]:
        """The end of a `loss`: the summed loss ÷ `total`, with the load-balancing term of a mixture
        of experts.

        `seen` is the micro-batch's part of the denominator `total`. The metrics get the loss under
        one name for all tasks.
        """
        balance, balance_metrics = balancing_term(aux_loss, self.config.model.aux_loss_coef, seen)
        minimised = {"train/loss_mean": Mean(float(summed.detach()), seen)}
        return (summed + balance) / total, metrics | minimised | balance_metrics

    @abstractmethod
    def evaluation_names(self, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        """The logged metrics of an evaluation, from the metrics of all its rows."""

    def text_format(self, tokenizer: PreTrainedTokenizerBase, ending: str) -> TextFormat | None:
        """The format of prompts in training, to be stored with the model; None if the flags do not
        define it.
        """
        return TextFormat.of(self.config.data, tokenizer, ending=ending)

    def prompt_column(self, dataset: Table) -> str | None:
        """The column with the prompts that a template is put around; None if the rows have no such
        column.
        """
        return getattr(self.config.data, "input_key", None)

    def look_at_rows(self, train_rows: Rows) -> list[Finding]:
        """Return findings about the training rows as a whole. By default there are none."""
        return []

    def measured_rows(self, train_rows: Rows) -> Any:
        """The rows to evaluate without --eval.dataset. By default there are none, and no
        evaluation.
        """
        return None

    def evaluated(self, model: nn.Module, numbers: Mapping[str, float]) -> None:
        """Called after each evaluation, in every process with the same numbers: a task may store
        some in the model.
        """


class LanguageTask(OfflineTask[Config, Row, Micro]):
    """A task that trains a language model, perhaps beside frozen ones."""

    model_class: ClassVar[type[PolicyModel]] = PolicyModel

    def check_model(self) -> None:
        """Raise ModelError unless the folders have complete language models that can be trained
        here.
        """
        check_causal_lm(trained_spec(self.config))
        for path in set(self.frozen_paths().values()) - {None}:
            check_causal_lm(load_spec(self.config, path))

    def load_model(self) -> PolicyModel:
        """A causal language model."""
        return self.model_class.load(
            trained_spec(self.config), balancing=self.config.model.aux_loss_coef > 0
        )

    def frozen_models(self) -> dict[str, Callable[[], nn.Module]]:
        """The models of `frozen_paths`."""
        specs = {name: load_spec(self.config, path) for name, path in self.frozen_paths().items()}
        return {name: partial(self.model_class.load, spec) for name, spec in specs.items()}


OFFLINE_TASKS: Registry[type[OfflineTask[Any, Any, Any]]] = Registry("offline task")


def offline_task(name: str) -> Callable[[Kind], Kind]:
    """A decorator that registers a task: `openrlhf <name> …` trains it."""

    def decorate(task: Kind) -> Kind:
        OFFLINE_TASKS.add(name, task)
        task.name = name
        return task

    return decorate


def load_spec(config: SupervisedConfig, path: str | None = None) -> LoadSpec:
    """The settings for loading the model as it is before the training, or another model at `path`."""
    return LoadSpec.of(config, path or config.model.model_name_or_path)


def trained_spec(config: SupervisedConfig) -> LoadSpec:
    """The settings for loading the model to train, with adapters if the flags ask for them."""
    return load_spec(config).trained(config.model, config.ds.lora, config.train.seed)
