"""Publishes weight versions to the engines: agree, send, verify, serve."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch
from torch import Tensor

from openrlhf.batches import TokenRows
from openrlhf.distributed.buckets import PublicationError, SentWeights, verify_receipt
from openrlhf.distributed.weight_sync import Transport, WeightGroup
from openrlhf.distributed.worker_group import Call, WorkerGroup, gather
from openrlhf.rollout.engine import RolloutEngine
from openrlhf.rollout.fleet import Fleet
from openrlhf.rollout.sampling import Generation, SamplingParams
from openrlhf.workers.policy import PolicyWorker


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Prompts that every engine answers with its first published weights, to compare engine and trainer.

    `params`: a few tokens, at the policy's temperature, without top-k or top-p. `tolerance`: the mean difference, in
    nats, of log-probabilities that rounding may explain.
    """

    prompts: Sequence[list[int]]
    params: SamplingParams
    tolerance: float


@dataclass(eq=False, repr=False)
class WeightPublisher:
    """Publishes the policy's weights to all engine workers. An engine serves a version after all receipts are verified.

    Senders and engine workers form one group. Without engines, as in a replay, nothing is published. The first
    publication ends with the `probe`, if there is one.
    """

    policy: WorkerGroup
    fleet: Fleet | None
    _: KW_ONLY
    transport: Transport
    timeout_s: float
    probe: Probe | None = None
    groups_made: int = field(default=0, init=False)
    connected: bool = field(default=False, init=False)

    def connect(self, fleet: Fleet) -> None:
        """Form the weight group, or a new one if an engine was replaced."""
        asked = self.policy.broadcast(PolicyWorker.weight_address)[:1]
        [(host, port)] = self._gather(asked, "tell where to send weights from")
        self.groups_made += 1
        # One rank broadcasts; CUDA IPC reaches a rank's own GPU only.
        senders = self.policy.layout.world_size if self.transport == "ipc" else 1
        group = WeightGroup(
            host=host,
            port=port,
            world_size=senders + fleet.size * fleet.workers_per_engine,
            transport=self.transport,
            name=f"weights-{self.groups_made}",
            timeout_s=self.timeout_s,
            senders=senders,
        )
        offsets = range(senders, group.world_size, fleet.workers_per_engine)
        joining = fleet.call_each(RolloutEngine.join, [{"rank_offset": offset} for offset in offsets], group)
        joining += self.policy.broadcast(PolicyWorker.join_weight_group, group)
        self._gather(joining, "join the weight group")
        self.connected = True

    def publish(self, version: int) -> None:
        """Send the policy's weights as `version`. Raises PublicationError, naming the differences."""
        if (fleet := self.fleet) is None:
            return
        if not self.connected:
            self.connect(fleet)
        listed = self.policy.broadcast(PolicyWorker.weight_manifest, version)[:1]
        [manifest] = self._gather(listed, "list its weights")
        receiving = fleet.call(RolloutEngine.receive, manifest)
        sending = self.policy.broadcast(PolicyWorker.send_weights, manifest)
        self.connected = False  # a failed publication leaves no group behind
        doing = f"publish weight version {version}"
        try:
            results = self._gather([*receiving, *sending], doing)
        except PublicationError as error:
            # The sender may notice first. Ask each engine, so that the message names the one that died.
            told = [str(error)]
            for call in receiving:
                try:
                    self._gather([call], doing)
                except PublicationError as engine:
                    told.append(str(engine))
            raise PublicationError("; ".join(dict.fromkeys(told))) from error
        self.connected = True
        sent: SentWeights = results[len(receiving)]
        for receipt in results[: len(receiving)]:
            verify_receipt(sent, receipt)
        self._serve(fleet)
        if self.probe:
            self.check_engines(fleet, self.probe)
            self.probe = None

    def _serve(self, fleet: Fleet) -> None:
        self._gather(fleet.call(RolloutEngine.resume), "serve the new weights")

    def check_engines(self, fleet: Fleet, probe: Probe) -> None:
        """Let every engine answer the probe with its present weights, and score the answers with the policy.

        Raises PublicationError if the log-probabilities differ by more than rounding explains: engine and trainer then
        compute different functions of the same weights. The engines' caches are empty afterwards.
        """
        asked = [
            call for prompt in probe.prompts for call in fleet.call(RolloutEngine.generate, prompt, [probe.params])
        ]
        answers = self._gather(asked, "sample from the new weights")
        self._gather(fleet.call(RolloutEngine.pause), "empty their caches")
        self._serve(fleet)
        asked_of = [prompt for prompt in probe.prompts for _ in range(fleet.size)]
        samples: list[Generation] = [sample for [sample] in answers]
        rows = TokenRows.from_lists(
            [prompt + sample.tokens for prompt, sample in zip(asked_of, samples, strict=True)],
            [[False] * len(p) + [True] * len(s.tokens) for p, s in zip(asked_of, samples, strict=True)],
        )
        scoring = self.policy.broadcast(PolicyWorker.logprobs, rows)
        ours: Tensor = self._gather(scoring, "score the engines' samples")[0][rows.loss_mask]
        theirs = [torch.tensor(sample.logprobs) for sample in samples]
        gaps = (ours - torch.cat(theirs)).abs().split([len(sample) for sample in theirs])
        for engine in range(fleet.size):
            gap = torch.cat(gaps[engine :: fleet.size])
            if not float(gap.mean()) <= probe.tolerance:
                raise PublicationError(
                    f"engine {engine} gives the same tokens other log-probabilities than the trainer, with the same "
                    f"weights: mean difference {gap.mean():.3g} nats, largest {gap.max():.3g}; rounding explains a mean "
                    f"of {probe.tolerance:g}. Engine and trainer compute this architecture differently: use another "
                    "architecture, or change --vllm.engine_args, --vllm.quantization or --ds.attn_implementation."
                )

    def _gather(self, calls: Sequence[Call], doing: str) -> list[Any]:
        return gather(calls, timeout_s=self.timeout_s, doing=doing, flag="--train.publish_timeout")
