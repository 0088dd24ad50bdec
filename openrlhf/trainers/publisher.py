"""Brings a weight version to the engines: agree, send, verify, serve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openrlhf.distributed.buckets import SentWeights, verify_receipt
from openrlhf.distributed.weight_sync import Transport, WeightGroup
from openrlhf.distributed.worker_group import WorkerGroup, gather
from openrlhf.workers.policy import PolicyWorker


class WeightPublisher:
    """Policy rank 0 and all engine workers in one group. An engine serves a version only once its receipt is verified.

    Without engines, as in a replay, there is nothing to publish.
    """

    def __init__(
        self,
        policy: WorkerGroup,
        engines: Sequence[Any],
        *,
        engine_logs: Sequence[str],
        transport: Transport,
        timeout_s: float,
    ) -> None:
        self.policy, self.engines, self.engine_logs = policy, list(engines), list(engine_logs)
        self.transport: Transport = transport
        self.timeout_s = timeout_s
        self.groups_made = 0
        self.connected = False

    def connect(self) -> None:
        """Form the weight group, anew when an engine was replaced."""
        [(host, port)] = self._gather(
            self.policy.broadcast(PolicyWorker.weight_address)[:1], "tell where to send weights from", self.policy.logs
        )
        self.groups_made += 1
        group = WeightGroup(
            host=host,
            port=port,
            world_size=1 + len(self.engines),
            transport=self.transport,
            name=f"weights-{self.groups_made}",
            timeout_s=self.timeout_s,
        )
        joining = [
            engine.join.remote(
                host=group.host,
                port=group.port,
                world_size=group.world_size,
                rank_offset=index,
                transport=group.transport,
                group=group.name,
                timeout_s=group.timeout_s,
            )
            for index, engine in enumerate(self.engines, start=1)
        ]
        joining += self.policy.broadcast(PolicyWorker.join_weight_group, group)
        self._gather(joining, "join the weight group", [*self.engine_logs, *self.policy.logs])
        self.connected = True

    def publish(self, version: int) -> None:
        """Send the policy's weights as `version`. Raises PublicationError, naming what differs, and then no engine serves it."""
        if not self.engines:
            return
        if not self.connected:
            self.connect()
        [manifest] = self._gather(
            [self.policy.broadcast(PolicyWorker.weight_manifest, version)[0]], "list its weights", self.policy.logs
        )
        receiving = [engine.receive.remote(manifest) for engine in self.engines]
        sending = self.policy.broadcast(PolicyWorker.send_weights, manifest)
        self.connected = False  # until it worked: a failed publication leaves no group behind
        logs = [*self.engine_logs, *self.policy.logs]
        results = self._gather([*receiving, *sending], f"publish weight version {version}", logs)
        self.connected = True
        sent: SentWeights = results[len(receiving)]
        for receipt in results[: len(receiving)]:
            verify_receipt(sent, receipt)
        self._gather([engine.resume.remote() for engine in self.engines], "serve the new weights", self.engine_logs)

    def _gather(self, references: Sequence[Any], doing: str, logs: Sequence[str]) -> list[Any]:
        flag = "--train.publish_timeout"
        return gather(references, timeout_s=self.timeout_s, doing=doing, logs=logs, flag=flag)
