"""Transports that move bytes from senders to engine workers.

A channel's calls block until the bytes have been transferred, or raise PublicationError. Each
`send` by a sender is matched by a `receive` by its receivers, with a buffer of the same size.

Senders and all engine workers form one group, separate from torch's default group. Broadcasts have
one sender, trainer rank 0. They use gloo between CPU processes, and NCCL between different GPUs.
With CUDA IPC, every trainer rank sends to the engine worker on its own GPU. Only gloo and, with one
rank, CUDA IPC have been tested so far. The NCCL code was written from torch's source code; its test
is marked `gpu` and needs two GPUs.
"""

import os
import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.multiprocessing.reductions import reduce_tensor

from openrlhf.rendezvous import host_store, join_store
from openrlhf.weights.manifest import PublicationError

Transport = Literal["gloo", "nccl", "ipc"]

ABANDONED = "abandoned"  # key in a group's store that means a member was lost
ABANDONED_CHECK_S = 1.0  # seconds between checks for the key
ABANDON_TIMEOUT_S = 5  # connection timeout when setting the key, in seconds


@dataclass(frozen=True, kw_only=True)
class WeightGroup:
    """A weight group's members, and the address `host:port` of rank 0, where the members meet.

    The first ranks of the group are the senders.
    """

    host: str
    port: int
    world_size: int
    transport: Transport
    name: str  # unique per group: a failed group's messages must not reach the next group
    timeout_s: float = 120.0
    senders: tuple[int, ...] = (0,)  # ranks of the senders among the policy's processes


class BroadcastChannel:
    """Broadcasts from rank 0 over a gloo or NCCL process group, separate from torch's default
    group.
    """

    def __init__(self, store: Store, group: WeightGroup, rank: int) -> None:
        self.group = group
        self.on_gpu = group.transport == "nccl"
        self.device = torch.device("cuda" if self.on_gpu else "cpu")
        self.store = store  # rank 0 hosts the store, which must live as long as the group
        self.backend: Any = None  # torch's Backend; None after `close`
        with _explaining(group, "the group did not form"):
            if self.on_gpu:
                self.backend = _nccl_backend(store, group, rank)
            else:
                timeout = timedelta(seconds=group.timeout_s)
                self.backend = dist.ProcessGroupGloo(store, rank, group.world_size, timeout)

    def send(self, buffer: Tensor) -> None:
        """Broadcast the bytes from rank 0, the root by default."""
        with _explaining(self.group, "a member died or did not respond in time"):
            self.backend.broadcast([buffer], dist.BroadcastOptions()).wait()

    receive = send  # a broadcast is the same call for the sender and the receivers

    def close(self) -> None:
        """Leave the group."""
        if self.on_gpu:
            self.backend.abort()
        # Gloo closes its sockets when the last reference is gone; the other members detect this.
        self.backend = None


def _nccl_backend(store: Store, group: WeightGroup, rank: int) -> Any:
    """Return an NCCL group without a watchdog.

    An NCCL group's watchdog kills the entire process if a member is lost. A group created with
    TORCH_NCCL_BLOCKING_WAIT has no watchdog. Instead, its `wait` raises an error, including after
    the timeout. The process's other groups keep their watchdog, because blocking waits are slow.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=group.timeout_s)
    before = os.environ.get("TORCH_NCCL_BLOCKING_WAIT", "0")
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    try:
        return dist.ProcessGroupNCCL(store, rank, group.world_size, options)
    finally:
        os.environ["TORCH_NCCL_BLOCKING_WAIT"] = before


class IpcChannel:
    """Shares a sender's memory with the worker on the same GPU, and waits for the worker's copy."""

    def __init__(self, store: Store, group: WeightGroup) -> None:
        self.group = group
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.uuid = str(torch.cuda.get_device_properties(self.device).uuid)
        self.store = store
        self.messages = 0

    def send(self, buffer: Tensor) -> None:
        """Offer the buffer to the worker, and wait until the worker has copied it."""
        torch.cuda.synchronize(self.device)
        key = self._next_key()
        self.store.set(key, pickle.dumps(reduce_tensor(buffer)))
        self._wait(f"{key}/copied")  # the caller may now reuse or free the buffer
        self.store.delete_key(key)
        self.store.delete_key(f"{key}/copied")

    def receive(self, buffer: Tensor) -> None:
        """Copy the sender's buffer into `buffer`."""
        key = self._next_key()
        self._wait(key)
        rebuild, arguments = pickle.loads(self.store.get(key))
        # Argument 6 is the GPU index, which may differ between processes.
        shared = rebuild(*arguments[:6], self.device.index, *arguments[7:])
        buffer.copy_(shared)
        torch.cuda.synchronize(self.device)
        del shared
        self.store.set(f"{key}/copied", "")

    def close(self) -> None:
        """Free memory that the worker no longer uses."""
        torch.cuda.ipc_collect()

    def _next_key(self) -> str:
        self.messages += 1
        return f"{self.uuid}/{self.messages}"

    def _wait(self, key: str) -> None:
        with _explaining(self.group, f"no response from the other process on GPU {self.uuid}"):
            _wait_for(self.store, [key], self.group)


def _meet(group: WeightGroup, rank: int) -> Store:
    """Return the group's store after all members have connected to it."""
    timeout = timedelta(seconds=group.timeout_s)
    open_store = host_store if rank == 0 else join_store
    what = f"rank {rank} could not open the trainer's store at {group.host}:{group.port}"
    with _explaining(group, what):
        tcp = open_store(group.host, group.port, timeout=timeout)
    store = PrefixStore(group.name, tcp)
    keys = [f"joined/{member}" for member in range(group.world_size)]
    store.set(keys[rank], "")
    began = time.monotonic()
    try:
        _wait_for(store, keys, group)
    except RuntimeError as error:
        waited_s = time.monotonic() - began
        raise _broken(group, _absent(store, keys, waited_s), error) from error
    return store


def abandon(group: WeightGroup) -> None:
    """Make the group's members stop waiting, because one of them was lost."""
    timeout = timedelta(seconds=ABANDON_TIMEOUT_S)
    try:
        tcp = join_store(group.host, group.port, timeout=timeout)
        PrefixStore(group.name, tcp).set(ABANDONED, "")
    except RuntimeError:
        pass  # rank 0 and its store are gone, so the members' waits have already failed


def _wait_for(store: Store, keys: list[str], group: WeightGroup) -> None:
    """Wait until all keys are set.

    Raises RuntimeError after `timeout_s`, or if the group is abandoned.
    """
    deadline = time.monotonic() + group.timeout_s
    while True:
        left = max(deadline - time.monotonic(), 0.0)
        try:
            return store.wait(keys, timedelta(seconds=min(ABANDONED_CHECK_S, left)))
        except dist.DistStoreError:  # the keys are not set yet
            if left <= ABANDONED_CHECK_S:
                raise
            if store.check([ABANDONED]):
                raise RuntimeError("a member of the group was lost") from None


def _absent(store: Store, keys: list[str], waited_s: float) -> str:
    """Describe which members have not joined."""
    try:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
    except RuntimeError:
        return "the trainer gave up or died before all members had joined"
    return f"ranks {missing} did not join within {waited_s:.0f} s"


@contextmanager
def _explaining(group: WeightGroup, what: str) -> Iterator[None]:
    """Convert torch's error in the block to a PublicationError that names the group."""
    try:
        yield
    except RuntimeError as error:
        raise _broken(group, what, error) from error


def _broken(group: WeightGroup, what: str, error: Exception) -> PublicationError:
    reason = str(error).splitlines()[0]
    return PublicationError(f"weight group {group.name} ({group.transport}): {what}: {reason}")


# One member's end of a weight group.
Channel = BroadcastChannel | IpcChannel


def join_group(group: WeightGroup, rank: int) -> Channel:
    """Join the group, waiting for its other members.

    Raises PublicationError after `timeout_s`, naming the missing members.
    """
    store = _meet(group, rank)
    if group.transport == "ipc":
        return IpcChannel(store, group)
    return BroadcastChannel(store, group, rank)


class Membership:
    """A process's membership in weight groups, one group at a time."""

    channel: Channel | None = None  # None if the process is not in a group
    rank: int

    def join(self, group: WeightGroup, rank: int = 0) -> None:
        """Leave the previous group and join a new one.

        Blocks until all members have joined.
        """
        self.leave()
        self.channel = join_group(group, rank)
        self.rank = rank

    def leave(self) -> None:
        """Close any open channel. The other members detect that the channel is closed."""
        if self.channel is not None:
            self.channel.close()
            self.channel = None

    @contextmanager
    def publishing(self) -> Iterator[Channel]:
        """Yield the channel. If the block fails, leave the group, so that other members fail too.

        Raises PublicationError if the process has not joined a group.
        """
        if self.channel is None:
            raise PublicationError("this process has not joined a weight group")
        try:
            yield self.channel
        except BaseException:
            self.leave()
            raise
