"""The controller's weight publisher, which coordinates sending, verifying and serving weights.

The publisher holds no weights. The publisher calls the processes of the policy and the engines
through the protocols in this module, because their classes are in higher-level packages.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Protocol

from openrlhf.weights.manifest import PublicationError, WeightManifest
from openrlhf.weights.receipts import WorkerReceipt
from openrlhf.weights.transport import Transport, WeightGroup, abandon

REPORT_TIMEOUT_S = 10.0  # time to wait for an engine's own error after another member failed


class PolicyCalls(Protocol):
    """Calls to every rank of the policy, implemented by `workers.policy.PolicyWorker`."""

    def weight_address(self) -> tuple[str, int]:
        """Return the address and port at which rank 0 will wait for the engines."""
        ...

    def join_weight_group(self, group: WeightGroup) -> None:
        """Leave the current weight group, and join the new group if this rank is a sender."""
        ...

    def weight_manifest(self, version: int) -> WeightManifest:
        """Return the list of tensors to be sent by the policy for this version."""
        ...

    def send_weights(self, manifest: WeightManifest) -> None:
        """Send the tensors in the manifest to the weight group."""
        ...


class EngineCalls(Protocol):
    """Calls to every engine, implemented by `rollout.engine.RolloutEngine`."""

    async def join(self, group: WeightGroup, rank_offset: int) -> None:
        """Join a weight group; the engine's first worker gets the rank `rank_offset`."""
        ...

    async def receive(self, manifest: WeightManifest) -> tuple[WorkerReceipt, ...]:
        """Receive and load the tensors in the manifest, and return a receipt from each worker."""
        ...

    async def resume(self) -> None:
        """Resume serving. Raises EngineError while the last publication is unverified."""
        ...


class PolicyProcesses(Protocol):
    """The policy's processes: a `cluster.worker_group.WorkerGroup`."""

    def broadcast(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        """Start a call in every process, and return the pending results, one per process."""
        ...


class EngineProcess(Protocol):
    """An engine's process: a `rollout.fleet.Member`."""

    index: int
    up: bool

    def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Start a call, and return its pending result."""
        ...


class Engines(Protocol):
    """All engines: a `rollout.fleet.Fleet`."""

    workers_per_engine: int

    @property
    def up(self) -> Sequence[EngineProcess]:
        """The engines that are ready to serve, in order."""
        ...

    def find_lost(self) -> None:
        """Restart the engines that do not respond."""
        ...

    def check(self) -> None:
        """Raise RolloutError if an engine was lost too often."""
        ...


@dataclass(eq=False, repr=False)
class WeightPublisher:
    """Publishes the policy's weights to all engines.

    Without engines (for example, in a replay), no weights are published.
    """

    policy: PolicyProcesses
    engines: Engines | None
    _: KW_ONLY
    transport: Transport
    timeout_s: float
    update_timeout_s: float  # limit for an update that is running when a refit starts
    wait_for: Callable[..., list[Any]]  # waits for calls: `cluster.worker_group.wait_for`
    # errors from `wait_for` that may mean that a process was lost
    failures: tuple[type[Exception], ...]
    check: Callable[[], None] | None = None  # called only once, after the first publication
    version: int = field(default=0, init=False)  # weights after all launched calls
    groups_made: int = field(default=0, init=False)
    group: WeightGroup | None = field(default=None, init=False)  # None without a working group
    connected: Sequence[EngineProcess] = field(default=(), init=False)  # current group's engines
    # Lock that is held while publishing weights and while launching an update.
    sending: threading.RLock = field(default_factory=threading.RLock, init=False)

    def publish(self, version: int) -> None:
        """Send the policy's weights to all engines as `version`.

        Engines that are restarting, even if that is all engines, receive the weights in their
        refit. Raises a PublicationError that names the differences, or the error of a lost process.
        """
        with self.sending:
            self.version = version
            if self.engines is not None:
                self._publish_to_all(self.engines)

    def refit(self, engine: EngineProcess) -> None:
        """Send the current weights to a newly started engine, and mark the engine as up."""
        with self.sending:
            self.group = None  # the engine's process is new, and has joined no group yet
            # Wait for the calls that the policy has not finished, such as an update. The policy
            # runs one call at a time. Without this wait, a refit would time out if the rest of the
            # update took longer than a publication may take.
            self.wait_for(
                self.policy.broadcast(PolicyCalls.weight_address),
                timeout_s=self.update_timeout_s,
                doing="finish their update before an engine is refitted",
                flag="--train.step_timeout",
            )
            self._publish([engine])
            engine.up = True

    def _publish_to_all(self, engines: Engines) -> None:
        while receivers := engines.up:
            try:
                self._publish(receivers)
                if self.check:
                    self.check()
                    self.check = None
                return
            except (PublicationError, *self.failures):
                engines.find_lost()
                if engines.up == receivers:
                    # No engine was lost.
                    # If a sender was lost, this call raises an error that names the sender.
                    self._wait_for(self.policy.broadcast(PolicyCalls.weight_address), "answer")
                    raise
        engines.check()

    def _publish(self, receivers: Sequence[EngineProcess]) -> None:
        """Send the weights to these engines.

        After a failed publication, no group remains, and no member keeps waiting for a lost member.
        """
        try:
            if self.group is None or self.connected != receivers:
                self._connect(receivers)
            self._send(receivers)
        except BaseException:
            if self.group:
                abandon(self.group)
            self.group = None
            raise

    def _send(self, receivers: Sequence[EngineProcess]) -> None:
        listing = self.policy.broadcast(PolicyCalls.weight_manifest, self.version)
        [manifest] = self._wait_for(listing[:1], "list its weights")
        receiving = [engine.call(EngineCalls.receive, manifest) for engine in receivers]
        sending = self.policy.broadcast(PolicyCalls.send_weights, manifest)
        try:
            self._wait_for([*receiving, *sending], f"publish weight version {manifest.version}")
        except PublicationError as error:
            raise self._with_reports(error, receiving) from error
        resuming = [engine.call(EngineCalls.resume) for engine in receivers]
        self._wait_for(resuming, "serve the new weights")

    def _connect(self, receivers: Sequence[EngineProcess]) -> None:
        """Let the senders and all workers of these engines join a new weight group."""
        assert self.engines
        workers = self.engines.workers_per_engine
        asked = self.policy.broadcast(PolicyCalls.weight_address)[:1]
        [(host, port)] = self._wait_for(asked, "report its address for sending weights")
        self.groups_made += 1
        senders = [0]
        if self.transport == "ipc":  # IPC works only within a GPU, so each rank with a worker sends
            senders = []
            for engine in receivers:
                first = engine.index * workers
                senders += range(first, first + workers)
        self.group = WeightGroup(
            host=host,
            port=port,
            world_size=len(senders) + len(receivers) * workers,
            transport=self.transport,
            name=f"weights-{self.groups_made}",
            timeout_s=self.timeout_s,
            senders=tuple(senders),
        )
        joining: list[Any] = []
        for position, engine in enumerate(receivers):
            offset = len(senders) + position * workers
            joining.append(engine.call(EngineCalls.join, self.group, rank_offset=offset))
        joining += self.policy.broadcast(PolicyCalls.join_weight_group, self.group)
        self._wait_for(joining, "join the weight group")
        self.connected = receivers

    def _with_reports(self, error: PublicationError, receiving: Sequence[Any]) -> PublicationError:
        """Return the sender's error with the engines' errors added.

        The sender may fail before an engine reports a failed load.
        """
        reports = [str(error)]
        for call in receiving:
            try:
                self.wait_for([call], timeout_s=REPORT_TIMEOUT_S, doing="answer")
            except PublicationError as report:
                reports.append(str(report))
            except self.failures:
                pass  # the engine died or does not respond, which `find_lost` will detect
        return PublicationError("; ".join(dict.fromkeys(reports)))

    def _wait_for(self, calls: Sequence[Any], doing: str) -> list[Any]:
        return self.wait_for(
            calls, timeout_s=self.timeout_s, doing=doing, flag="--train.publish_timeout"
        )
