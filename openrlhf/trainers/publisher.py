"""Publishes weight versions to the engines: agree, send, verify, serve."""

import threading
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch
from torch import Tensor

from openrlhf.cluster.worker_group import Call, WorkerError, WorkerGroup, gather
from openrlhf.core.batches import TokenRows
from openrlhf.rollout.engine import EngineError, RolloutEngine
from openrlhf.rollout.fleet import Fleet, Member
from openrlhf.rollout.sampling import Generation, SamplingParams
from openrlhf.weights.manifest import PublicationError
from openrlhf.weights.transport import Transport, WeightGroup
from openrlhf.workers.policy import PolicyWorker

ANSWER_S = 10.0  # for an engine to answer when another has failed


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Prompts that every engine answers with its first published weights, to compare engine and
    trainer.

    `params`: a few tokens, at the policy's temperature, without top-k or top-p. `tolerance`: the
    mean difference, in nats, of log-probabilities that rounding may explain.
    """

    prompts: Sequence[list[int]]
    params: SamplingParams
    tolerance: float


@dataclass(eq=False, repr=False)
class WeightPublisher:
    """Publishes the policy's weights to all engine workers. An engine serves a version after all
    receipts are verified.

    Senders and engine workers form one group. Without engines, as in a replay, nothing is
    published. The first publication ends with the `probe`, if there is one.
    """

    policy: WorkerGroup
    fleet: Fleet | None
    _: KW_ONLY
    transport: Transport
    timeout_s: float
    probe: Probe | None = None
    groups_made: int = field(default=0, init=False)
    connected: list[Member] = field(
        default_factory=list[Member], init=False
    )  # the engines of the weight group
    sending: threading.RLock = field(
        default_factory=threading.RLock, init=False
    )  # held to publish or start an update

    def publish(self, version: int) -> None:
        """Send the policy's weights as `version` to all engines.

        Engines that are lost meanwhile start again, and are sent the weights when they have. Raises
        PublicationError, naming the differences, or WorkerError.
        """
        with self.sending:
            self._publish_to_all(version)
            if self.probe and self.fleet and self.fleet.up:
                self.check_engines(self.fleet, self.probe)
                self.probe = None

    def refit(self, engine: Member) -> None:
        """Send the present weights to an engine that has started. From now on it is up."""
        with self.sending:
            self.connected = []
            self._publish([engine])
            engine.up = True

    def _publish_to_all(self, version: int) -> None:
        while self.fleet and (engines := self.fleet.up):
            try:
                return self._publish(engines, version)
            except (PublicationError, WorkerError, EngineError):
                self.connected = []  # a failed publication leaves no group behind
                self.fleet.find_lost()
                if (
                    self.fleet.up == engines
                ):  # no engine was lost; the loss of a sender is a WorkerError
                    self._gather(self.policy.broadcast(PolicyWorker.weight_address), "answer")
                    raise
        if self.fleet:
            self.fleet.check()

    def connect(self, engines: list[Member], workers: int) -> None:
        """Form the weight group of these engines, each of so many workers."""
        asked = self.policy.broadcast(PolicyWorker.weight_address)[:1]
        [(host, port)] = self._gather(asked, "tell where to send weights from")
        self.groups_made += 1
        # One rank broadcasts; CUDA IPC reaches a rank's own GPU only, so that each rank with an
        # engine sends.
        ranks = [engine.index * workers + worker for engine in engines for worker in range(workers)]
        senders = ranks if self.transport == "ipc" else [0]
        group = WeightGroup(
            host=host,
            port=port,
            world_size=len(senders) + len(ranks),
            transport=self.transport,
            name=f"weights-{self.groups_made}",
            timeout_s=self.timeout_s,
            senders=tuple(senders),
        )
        offsets = range(len(senders), group.world_size, workers)
        joining = [
            engine.call(RolloutEngine.join, group, rank_offset=offset)
            for engine, offset in zip(engines, offsets, strict=True)
        ]
        joining += self.policy.broadcast(PolicyWorker.join_weight_group, group)
        self._gather(joining, "join the weight group")
        self.connected = engines

    def _publish(self, engines: list[Member], version: int | None = None) -> None:
        """Send the weights as a new version, or as the version that they are."""
        assert self.fleet
        if self.connected != engines:
            self.connect(engines, self.fleet.workers_per_engine)
        [manifest] = self._gather(
            self.policy.broadcast(PolicyWorker.weight_manifest, version)[:1], "list its weights"
        )
        receiving = [engine.call(RolloutEngine.receive, manifest) for engine in engines]
        sending = self.policy.broadcast(PolicyWorker.send_weights, manifest)
        try:
            self._gather([*receiving, *sending], f"publish weight version {manifest.version}")
        except PublicationError as error:
            raise told_by_all(error, receiving) from error
        self._gather(
            [engine.call(RolloutEngine.resume) for engine in engines], "serve the new weights"
        )

    def check_engines(self, fleet: Fleet, probe: Probe) -> None:
        """Let every engine answer the probe with its present weights, and score the answers with
        the policy.

        Raises PublicationError if the log-probabilities differ by more than rounding explains:
        engine and trainer then compute different functions of the same weights. The engines' caches
        are empty afterwards.
        """
        engines = fleet.up
        asked = [
            engine.call(RolloutEngine.generate, prompt, [probe.params])
            for prompt in probe.prompts
            for engine in engines
        ]
        answers = self._gather(asked, "sample from the new weights")
        self._gather([engine.call(RolloutEngine.pause) for engine in engines], "empty their caches")
        self._gather(
            [engine.call(RolloutEngine.resume) for engine in engines], "serve the new weights"
        )
        asked_of = [prompt for prompt in probe.prompts for _ in engines]
        samples: list[Generation] = [sample for [sample] in answers]
        rows = TokenRows.from_lists(
            [prompt + sample.tokens for prompt, sample in zip(asked_of, samples, strict=True)],
            [
                [False] * len(p) + [True] * len(s.tokens)
                for p, s in zip(asked_of, samples, strict=True)
            ],
        )
        scoring = self.policy.broadcast(PolicyWorker.logprobs, rows)
        ours: Tensor = self._gather(scoring, "score the engines' samples")[0][rows.loss_mask]
        theirs = [torch.tensor(sample.logprobs) for sample in samples]
        gaps = (ours - torch.cat(theirs)).abs().split([len(sample) for sample in theirs])
        for engine in range(len(engines)):
            gap = torch.cat(gaps[engine :: len(engines)])
            if not float(gap.mean()) <= probe.tolerance:
                raise PublicationError(
                    f"engine {engines[engine].index} gives the same tokens other log-probabilities than the trainer, with the same "
                    f"weights: mean difference {gap.mean():.3g} nats, largest {gap.max():.3g}; rounding explains a mean "
                    f"of {probe.tolerance:g}. Engine and trainer compute this architecture differently: use another "
                    "architecture, or change --vllm.engine_args, --vllm.quantization or --ds.attn_implementation."
                )

    def _gather(self, calls: Sequence[Call], doing: str) -> list[Any]:
        return gather(calls, timeout_s=self.timeout_s, doing=doing, flag="--train.publish_timeout")


def told_by_all(error: PublicationError, receiving: Sequence[Call]) -> PublicationError:
    """The error with those of the engines: the sender may notice first that one could not load."""
    told = [str(error)]
    for call in receiving:
        try:
            gather([call], timeout_s=ANSWER_S, doing="answer")
        except PublicationError as engine:
            told.append(str(engine))
        except (WorkerError, EngineError):
            pass  # it died, or does not answer: the fleet will find it
    return PublicationError("; ".join(dict.fromkeys(told)))
