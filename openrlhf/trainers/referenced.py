"""What the tasks with a frozen reference share: the reference, its log-probabilities, and pairs that stay together."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor

from openrlhf.batches import Answers
from openrlhf.config.supervised import DPOConfig, KTOConfig
from openrlhf.models.adapters import adapters_off
from openrlhf.observability.metrics import Mean, Metric
from openrlhf.trainers.tasks import LanguageTask, Row

Referenced = TypeVar("Referenced", bound=DPOConfig | KTOConfig)
REFERENCE = "reference"  # its name among the frozen models


class ReferencedTask(LanguageTask[Referenced, Row, Answers], Generic[Referenced, Row]):
    """A language model that is compared with a frozen one. Rows 2i and 2i + 1 of a micro-batch belong together."""

    together: ClassVar = 2

    @property
    def compares(self) -> bool:
        """Whether the loss reads the reference."""
        return True

    def frozen_paths(self) -> dict[str, str | None]:
        """The reference, unless it is the trained model without its adapters."""
        return {} if self.config.reference_is_policy else {REFERENCE: self.config.ref.model_name_or_path}

    @property
    def offloads(self) -> bool:
        """--ref.offload."""
        return self.config.ref.offload

    def before(self, model: Any, micro: Answers) -> tuple[Answers, Mapping[str, float]]:
        """Σ log π_ref of the answers, unless it is known or not needed."""
        if micro.reference is not None or not self.compares:
            return micro, {}
        reference = self.frozen.get(REFERENCE, model)
        with nullcontext() if REFERENCE in self.frozen else adapters_off(model.module):
            scores = reference(micro.tokens, micro.offsets, micro.loss_mask)
        return replace(micro, reference=micro.answer_sums(scores.logprobs)), {}


def answers_of(tokens: Sequence[Sequence[int]], prompts: Sequence[int], **columns: Tensor | None) -> Answers:
    """Texts whose tokens after the prompt are targets; the first token of a text never is."""
    starts = [max(1, length) for length in prompts]
    masks = [[False] * start + [True] * (len(row) - start) for row, start in zip(tokens, starts, strict=True)]
    return Answers.from_lists(tokens, masks, **columns)


def pair_metrics(losses: Tensor, rewards: Tensor) -> dict[str, Metric]:
    """Loss, accuracy and mean rewards of pairs. Rewards 2i and 2i + 1 are those of the chosen and rejected text of pair i."""
    chosen, rejected, pairs = rewards[0::2], rewards[1::2], len(losses)
    loss = Mean(float(losses.detach().sum()), pairs)
    accuracy = Mean(float((chosen > rejected).sum()), pairs)
    return {
        "train/loss": loss,
        "train/acc": accuracy,
        "train/loss_mean": loss,  # the same under the names of old dashboards
        "train/acc_mean": accuracy,
        "train/chosen_reward": Mean(float(chosen.sum()), pairs),
        "train/reject_reward": Mean(float(rejected.sum()), pairs),
    }
