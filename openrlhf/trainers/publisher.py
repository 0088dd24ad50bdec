"""Brings a weight version to the engines: agree, send, verify, serve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openrlhf.distributed.buckets import SentWeights, verify_receipt
from openrlhf.distributed.weight_sync import Transport, WeightGroup
from openrlhf.distributed.worker_group import WorkerGroup, gather
from openrlhf.rollout.engine import RolloutEngine
from openrlhf.rollout.fleet import Fleet
from openrlhf.workers.policy import PolicyWorker


class WeightPublisher:
    """Policy rank 0 and all engine workers in one group. An engine serves a version only once its receipt is verified.

    Without engines, as in a replay, there is nothing to publish.
    """

    def __init__(self, policy: WorkerGroup, fleet: Fleet | None, *, transport: Transport, timeout_s: float) -> None:
        self.policy, self.fleet = policy, fleet
        self.transport: Transport = transport
        self.timeout_s = timeout_s
        self.groups_made = 0
        self.connected = False

    def connect(self, fleet: Fleet) -> None:
        """Form the weight group, anew when an engine was replaced."""
        [(host, port)] = self._gather(
            self.policy.broadcast(PolicyWorker.weight_address)[:1], "tell where to send weights from", self.policy.logs
        )
        self.groups_made += 1
        group = WeightGroup(
            host=host,
            port=port,
            world_size=1 + fleet.size * fleet.workers_per_engine,
            transport=self.transport,
            name=f"weights-{self.groups_made}",
            timeout_s=self.timeout_s,
        )
        told = {"group" if name == "name" else name: value for name, value in vars(group).items()}
        offsets = range(1, group.world_size, fleet.workers_per_engine)
        joining = fleet.call_each(RolloutEngine.join, [told | {"rank_offset": offset} for offset in offsets])
        joining += self.policy.broadcast(PolicyWorker.join_weight_group, group)
        self._gather(joining, "join the weight group", [*fleet.logs, *self.policy.logs])
        self.connected = True

    def publish(self, version: int) -> None:
        """Send the policy's weights as `version`. Raises PublicationError, naming what differs, and then no engine serves it."""
        if (fleet := self.fleet) is None:
            return
        if not self.connected:
            self.connect(fleet)
        [manifest] = self._gather(
            [self.policy.broadcast(PolicyWorker.weight_manifest, version)[0]], "list its weights", self.policy.logs
        )
        receiving = fleet.call(RolloutEngine.receive, manifest)
        sending = self.policy.broadcast(PolicyWorker.send_weights, manifest)
        self.connected = False  # until it worked: a failed publication leaves no group behind
        logs = [*fleet.logs, *self.policy.logs]
        results = self._gather([*receiving, *sending], f"publish weight version {version}", logs)
        self.connected = True
        sent: SentWeights = results[len(receiving)]
        for receipt in results[: len(receiving)]:
            verify_receipt(sent, receipt)
        self._gather(fleet.call(RolloutEngine.resume), "serve the new weights", fleet.logs)

    def _gather(self, references: Sequence[Any], doing: str, logs: Sequence[str]) -> list[Any]:
        flag = "--train.publish_timeout"
        return gather(references, timeout_s=self.timeout_s, doing=doing, logs=logs, flag=flag)
