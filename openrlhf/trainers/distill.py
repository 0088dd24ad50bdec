"""Knowledge distillation: a student learns the responses, and the teacher's distribution of each of
their tokens.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar, cast

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
from openrlhf.models.policy import LogitModel
from openrlhf.observability.metrics import Mean, Metric
from openrlhf.rewards.remote_engines import RemoteEngine
from openrlhf.trainers.remote_teacher import RemoteTeacher
from openrlhf.trainers.sft import SFTTask
from openrlhf.trainers.tasks import load_spec, offline_task

TEACHER = "--kd.teacher_model"


@offline_task("kd")
class DistillationTask(SFTTask):
    """(1 − c) · −log π(token_t) + c · −Σ_v π_T(v) log π(v) of target tokens, mean over the window's
    target tokens.
    """

    root: ClassVar = KDConfig
    model_class: ClassVar = LogitModel
    objective: ClassVar = ("kd.coef", "kd.top_k", "model.aux_loss_coef")

    @property
    def kd(self) -> KDLossConfig:
        """The flags of the distillation."""
        return cast(KDConfig, self.config).kd

    def frozen_paths(self) -> dict[str, str | None]:
        """The teacher, unless a server has it."""
        return {} if self.kd.served else {TEACHER: self.kd.teacher_model}

    @cached_property
    def server(self) -> RemoteTeacher:
        """The teacher's server."""
        url = self.kd.teacher_model
        engine = RemoteEngine.at(
            url, RuleConfig(), kind="server", flag=TEACHER, limit="of a request"
        )
        return RemoteTeacher(f"{TEACHER} {url}", engine, best=self.kd.top_k or 0)

    def rows(self, dataset: Table, tokenizer: PreTrainedTokenizerBase) -> SFTDataset:
        """As in SFT. Raises ConfigError if the teacher's server does not answer, or has another
        vocabulary.
        """
        if self.kd.served:
            self.server.check(tokenizer, max_len=self.config.data.max_len)
        return super().rows(dataset, tokenizer)

    @cached_property
    def shared(self) -> int:
        """Token ids that both models have logits for: vocabularies may be padded to unlike sizes."""
        paths = (None, *self.frozen_paths().values())
        configs = (configuration(load_spec(self.config, path)) for path in paths)
        return min(config.get_text_config().vocab_size for config in configs)

    @property
    def offloads(self) -> bool:
        """--kd.teacher_offload."""
        return self.kd.teacher_offload

    def computed(self, micro: TokenRows, at: Tensor) -> Tensor:
        """The teacher's logits at the places `at` (K, V), or (K, k, 2): its k largest with their
        tokens.
        """
        top_k, shared = self.kd.top_k, self.shared

        def best(logits: Tensor, rows: slice) -> Tensor:
            if top_k is None:
                return logits[:, :shared]
            chosen = logits[:, :shared].topk(min(top_k, shared))
            return torch.stack([chosen.values, chosen.indices.to(logits.dtype)], -1)

        with torch.no_grad():
            said = self.frozen[TEACHER](micro.tokens, micro.offsets, at, best).values
        self.frozen[TEACHER].rest()  # the student computes now
        return said

    def asked(self, micro: TokenRows) -> Tensor:
        """What the server says of the token after each token (N, k, 2): log-probabilities and
        tokens; −∞ where it says nothing.
        """
        rows = [row.tolist() for row in micro.tokens.split(micro.lengths.tolist())]
        said = torch.tensor([-torch.inf, 0.0]).repeat(len(micro.tokens), self.server.best, 1)
        for start, places in zip(micro.offsets.tolist(), self.server.likeliest(rows), strict=False):
            for place, found in enumerate(places, start):
                known = [(logprob, token) for logprob, token in found if token < self.shared]
                said[place, : len(known)] = torch.tensor(known).reshape(-1, 2)
        return said.to(micro.tokens.device)

    def loss(
        self, model: Any, micro: TokenRows, totals: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Metric]]:
        """This micro-batch's part of the mean over the window's target tokens, and its metrics."""
        at, targets = (
            micro.loss_mask.roll(-1),
            micro.tokens[micro.loss_mask],
        )  # the logits before each target
        top_k, shared = self.kd.top_k, self.shared
        taught = self.asked(micro)[at] if self.kd.served else self.computed(micro, at)

        def both(logits: Tensor, rows: slice) -> Tensor:
            own = -torch.log_softmax(logits, -1).gather(1, targets[rows, None])[:, 0]
            of_chunk = taught[rows]
            tokens = None if top_k is None else of_chunk[..., 1].long()
            teacher = of_chunk if tokens is None else of_chunk[..., 0]
            return torch.stack([own, soft_cross_entropy(logits[:, :shared], teacher, tokens)], 1)

        outputs = model(micro.tokens, micro.offsets, at, both)
        own, soft = outputs.values.sum(0)
        seen = float(len(targets))
        summed = (1 - self.kd.coef) * own + self.kd.coef * soft
        metrics: dict[str, Metric] = {
            "train/gpt_loss": Mean(float(own.detach()), seen),
            "train/distil_loss": Mean(float(soft.detach()), seen),
        }
        return self.share(summed, outputs.aux_loss, seen, totals["tokens"], metrics)
