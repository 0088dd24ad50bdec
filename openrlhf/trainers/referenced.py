"""What the tasks with a frozen reference share: the reference, its log-probabilities, and pairs that stay together."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from openrlhf.batches import Answers, Ragged
from openrlhf.config.supervised import DPOConfig, KTOConfig
from openrlhf.models.loading import check_is_causal, load_causal_lm
from openrlhf.models.policy import PolicyModel
from openrlhf.trainers.tasks import OfflineTask, Row, load_spec
from openrlhf.workers.base import MicroBatchLimits

Referenced = TypeVar("Referenced", bound=DPOConfig | KTOConfig)
Flat = TypeVar("Flat", bound=Ragged)
REFERENCE = "reference"  # its name among the frozen models


class ReferencedTask(OfflineTask[Referenced, Row, Answers], Generic[Referenced, Row]):
    """A language model that is compared with a frozen one. Rows 2i and 2i + 1 of a micro-batch belong together."""

    def check_model(self) -> None:
        """Raise ModelError unless the stored configurations are of language models that can be trained here."""
        check_is_causal(load_spec(self.config))
        if self.config.ref.model_name_or_path:
            check_is_causal(load_spec(self.config, self.config.ref.model_name_or_path))

    def load_model(self) -> PolicyModel:
        """A causal language model."""
        return self._language_model(None, balancing=self.config.model.aux_loss_coef > 0)

    def _language_model(self, path: str | None, *, balancing: bool = False) -> PolicyModel:
        spec = load_spec(self.config, path)
        return PolicyModel(load_causal_lm(spec), packing=spec.packing, balancing=balancing)

    def frozen_models(self) -> dict[str, Callable[[], nn.Module]]:
        """The reference; by default the model as it is before the training."""
        return {REFERENCE: lambda: self._language_model(self.config.ref.model_name_or_path)}

    @property
    def offloads(self) -> bool:
        """--ref.offload."""
        return self.config.ref.offload

    def micro_batches(self, batch: Answers, limits: MicroBatchLimits) -> list[Answers]:
        """The batch in parts that keep pairs together. A limit of rows counts pairs."""
        return in_pairs(batch, limits)

    def before(self, model: Any, micro: Answers) -> tuple[Answers, Mapping[str, float]]:
        """Σ log π_ref of the answers, unless it is known."""
        if micro.reference is not None or REFERENCE not in self.frozen:
            return micro, {}
        scores = self.frozen[REFERENCE](micro.tokens, micro.offsets, micro.loss_mask)
        return replace(micro, reference=micro.answer_sums(scores.logprobs)), {}


def in_pairs(batch: Flat, limits: MicroBatchLimits) -> list[Flat]:
    """A batch whose rows 2i and 2i + 1 are a pair, in parts that keep pairs together. A limit of rows counts pairs."""
    cut = limits.cut(batch.lengths.view(-1, 2).amax(1))
    return batch.split([[2 * pair + side for pair in part for side in (0, 1)] for part in cut])


def answers_of(tokens: Sequence[Sequence[int]], prompts: Sequence[int], **columns: Tensor) -> Answers:
    """Texts whose tokens after the prompt are targets; the first token of a text never is."""
    starts = [max(1, length) for length in prompts]
    masks = [[False] * start + [True] * (len(row) - start) for row, start in zip(tokens, starts, strict=True)]
    rows = Answers.from_lists(tokens, masks)
    return replace(rows, **columns)


def zeros_unless(column: Tensor | None, like: Tensor) -> Tensor:
    """A column, or zeros where nobody computed it."""
    return torch.zeros_like(like) if column is None else column
