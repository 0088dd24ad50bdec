"""Knowledge distillation.

A student is trained on the responses and on the teacher's distribution at each response token.
"""

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Self, cast

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from openrlhf.algorithms.supervised_losses import soft_cross_entropy
from openrlhf.config.rollout import RuleConfig
from openrlhf.config.supervised import KDConfig, KDLossConfig
from openrlhf.core.batches import TokenRows
from openrlhf.data.loading import Table
from openrlhf.data.sft import SFTDataset
from openrlhf.models.loading import configuration
from openrlhf.models.policy import LogitModel, LogitSource, logit_source, reduced_logits
from openrlhf.observability.metrics import Metric
from openrlhf.rewards.remote_engines import RemoteEngine
from openrlhf.trainers.remote_teacher import RemoteTeacher
from openrlhf.trainers.sft import SFTTask
from openrlhf.trainers.tasks import load_spec, offline_task
from openrlhf.workers.base import mean_of

TEACHER = "--kd.teacher_model"


class TopLogits(NamedTuple):
    """A teacher's logits at K positions for the k most likely tokens."""

    values: Tensor  # (K, k)
    tokens: Tensor  # (K, k), the token of each logit

    @classmethod
    def of(cls, pairs: Tensor) -> Self:
        """Convert pairs (K, k, 2) of a logit and its token."""
        return cls(pairs[..., 0], pairs[..., 1].long())


@offline_task("kd")
class DistillationTask(SFTTask):
    """ℓ_t = (1 − c) · −log π(token_t) + c · −Σ_v π_T(v) log π(v) for target tokens.

    The loss is averaged over the target tokens of the accumulation window on all ranks.
    """

    root: ClassVar = KDConfig
    model_class: ClassVar = LogitModel
    objective: ClassVar = ("kd.coef", "kd.top_k", "model.aux_loss_coef")

    @property
    def kd(self) -> KDLossConfig:
        """The distillation flags (--kd.*)."""
        return cast(KDConfig, self.config).kd

    def frozen_paths(self) -> dict[str, str | None]:
        """Return the teacher's path, unless the teacher runs on a server."""
        if self.kd.served:
            return {}
        return {TEACHER: self.kd.teacher_model}

    @cached_property
    def server(self) -> RemoteTeacher:
        """The teacher's server."""
        url = self.kd.teacher_model
        engine = RemoteEngine(url, RuleConfig(), kind="server", flag=TEACHER, limit="of a request")
        return RemoteTeacher(f"{TEACHER} {url}", engine, best=self.kd.top_k or 0)

    def rows(self, dataset: Table, tokenizer: PreTrainedTokenizerBase) -> SFTDataset:
        """Return the same rows as SFT.

        Raises ConfigError if the teacher's server does not answer, and DataError if its vocabulary
        differs.
        """
        if self.kd.served:
            self.server.check(tokenizer, max_len=self.config.data.max_len)
        return super().rows(dataset, tokenizer)

    @cached_property
    def shared(self) -> int:
        """The number of token ids for which both models have logits.

        Models may pad the same vocabulary to different sizes.
        """
        sizes: list[int] = []
        for path in (None, *self.frozen_paths().values()):
            config = configuration(load_spec(self.config, path))
            sizes.append(config.get_text_config().vocab_size)
        return min(sizes)

    @property
    def offloads(self) -> bool:
        """The value of --kd.teacher_offload."""
        return self.kd.teacher_offload

    def ask_model(self, micro: TokenRows, at: Tensor) -> TopLogits | LogitSource:
        """Run the loaded teacher at the positions selected by the mask `at` (N,).

        Without --kd.top_k, the result is a source of the teacher's logits, which computes the
        logits for one chunk of positions at a time.
        """
        top_k = self.kd.top_k
        teacher = self.frozen[TEACHER]
        with torch.no_grad():
            if top_k is None:
                found = logit_source(teacher, micro.tokens, micro.offsets, at)
            else:

                def kept(logits: Tensor, rows: slice | Tensor) -> Tensor:
                    chosen = logits[:, : self.shared].topk(min(top_k, self.shared))
                    return torch.stack([chosen.values, chosen.indices.to(logits.dtype)], -1)

                pairs = reduced_logits(teacher, micro.tokens, micro.offsets, at, kept).values
                found = TopLogits.of(pairs)
        teacher.rest()  # free device memory for the student's forward pass
        return found

    def ask_server(self, micro: TokenRows, at: Tensor) -> TopLogits:
        """Request the log-probabilities of the most likely next tokens at the positions `at` (N,).

        Tokens that are missing from the server's response get −∞.
        """
        rows = [part.tolist() for part in micro.parts(micro.tokens)]
        missing = (-math.inf, 0)
        pairs: list[list[tuple[float, int]]] = []
        for places in self.server.likeliest(rows):
            for returned in [*places, []]:  # no token follows the last position of a row
                known = [entry for entry in returned if entry[1] < self.shared]
                pairs.append(known + [missing] * (self.server.best - len(known)))
        return TopLogits.of(torch.tensor(pairs, device=micro.tokens.device)[at])

    def loss(
        self, model: Any, micro: TokenRows, totals: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Metric]]:
        """Return this micro-batch's contribution to the mean over the window's target tokens."""
        at = micro.loss_mask.roll(-1)  # each target is predicted from the preceding position
        targets = micro.tokens[micro.loss_mask]
        shared = self.shared
        if self.kd.served:
            teacher = self.ask_server(micro, at)
        else:
            teacher = self.ask_model(micro, at)

        def losses(logits: Tensor, rows: slice | Tensor) -> Tensor:
            own = -torch.log_softmax(logits, -1).gather(1, targets[rows, None])[:, 0]
            if isinstance(teacher, TopLogits):
                theirs, tokens = teacher.values[rows], teacher.tokens[rows]
            else:
                theirs, tokens = teacher.logits(rows)[:, :shared], None
            soft = soft_cross_entropy(logits[:, :shared], theirs, tokens)
            return torch.stack([own, soft], 1)

        outputs = reduced_logits(model, micro.tokens, micro.offsets, at, losses)
        own, soft = outputs.values.sum(0)
        seen = float(len(targets))
        summed = (1 - self.kd.coef) * own + self.kd.coef * soft
        metrics: dict[str, Metric] = {
            "train/gpt_loss": mean_of(own, seen),
            "train/distil_loss": mean_of(soft, seen),
        }
        return self.share(summed, outputs.aux_loss, seen, totals["tokens"], metrics)
