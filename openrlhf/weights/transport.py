"""Transport of weights from trainer to engines: the channel of both halves, and the sender.

Senders and all engine workers form one group, outside torch's default group. Broadcasts have one
sender, trainer rank 0: gloo between CPU processes, NCCL between different GPUs. With CUDA IPC every
trainer rank sends to the engine worker on its own GPU. Only gloo has been run so far. NCCL and CUDA
IPC are written from torch's sources; their tests have the marker `gpu` and need a machine with
GPUs.
"""

import os
import pickle
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


@dataclass(frozen=True, kw_only=True)
class WeightGroup:
    """The members of a weight sync and their meeting point: `host:port` of rank 0. The first ranks
    are the `senders`.
    """

    host: str
    port: int
    world_size: int
    transport: Transport
    name: str  # a fresh one for every group: a failed group's messages must not reach the next
    timeout_s: float = 120.0
    senders: tuple[int, ...] = (0,)  # their ranks among the policy's processes


def _meet(group: WeightGroup, rank: int) -> Store:
    timeout = timedelta(seconds=group.timeout_s)
    keys = {member: f"joined/{member}" for member in range(group.world_size)}
    open_store = host_store if rank == 0 else join_store
    try:
        tcp = open_store(group.host, group.port, timeout=timeout)
    except RuntimeError as error:
        role = "listen" if rank == 0 else "reach the trainer"
        raise _broken(
            group, f"rank {rank} could not {role} at {group.host}:{group.port}", error
        ) from error
    store = PrefixStore(group.name, tcp)
    store.set(keys[rank], "")
    try:
        store.wait(list(keys.values()), timeout)
    except RuntimeError as error:
        raise _broken(group, _absent(store, keys, group.timeout_s), error) from error
    return store


def _absent(store: Store, keys: dict[int, str], timeout_s: float) -> str:
    try:
        missing = [member for member, key in keys.items() if not store.check([key])]
    except RuntimeError:
        return "the trainer gave up or died before all members had joined"
    return f"ranks {missing} did not join within {timeout_s:g} s"


def _broken(group: WeightGroup, what: str, error: Exception) -> PublicationError:
    return PublicationError(
        f"weight group {group.name} ({group.transport}): {what}: {str(error).splitlines()[0]}"
    )


class _BroadcastChannel:
    """Broadcast from rank 0, over a gloo or NCCL process group outside torch's default group."""

    def __init__(self, store: Store, group: WeightGroup, rank: int) -> None:
        self.group = group
        self.on_gpu = group.transport == "nccl"
        self.device = torch.device("cuda" if self.on_gpu else "cpu")
        self.store = store  # rank 0 hosts it: it must live as long as the group
        self.backend: Any = None  # torch's Backend; None after `close`
        timeout = timedelta(seconds=group.timeout_s)
        if self.on_gpu:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            # The watchdog of an NCCL group ends the whole process if a member is lost. A group made
            # with this variable has no watchdog: `wait` raises an error, also after the timeout.
            # Other groups keep the watchdog: blocking waits are slow.
            before = os.environ.get("TORCH_NCCL_BLOCKING_WAIT", "0")
            os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
            try:
                self.backend = dist.ProcessGroupNCCL(store, rank, group.world_size, options)
            except RuntimeError as error:
                raise _broken(group, "the group could not be formed", error) from error
            finally:
                os.environ["TORCH_NCCL_BLOCKING_WAIT"] = before
        else:
            try:
                self.backend = dist.ProcessGroupGloo(store, rank, group.world_size, timeout)
            except RuntimeError as error:
                raise _broken(group, "a member left while the group formed", error) from error

    def send(self, buffer: Tensor) -> None:
        try:
            self.backend.broadcast(
                [buffer], dist.BroadcastOptions()
            ).wait()  # by default from rank 0
        except RuntimeError as error:
            raise _broken(self.group, "a member died, or did not answer in time", error) from error

    receive = send  # a broadcast is one call on all sides

    def close(self) -> None:
        if self.on_gpu:
            self.backend.abort()
        self.backend = None  # gloo closes its sockets, by which the others notice, only when nothing refers to them


class _IpcChannel:
    """Gives the worker on this GPU a handle to the sender's memory. The worker copies the memory
    and confirms it.
    """

    def __init__(self, store: Store, group: WeightGroup) -> None:
        self.group = group
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.uuid = str(torch.cuda.get_device_properties(self.device).uuid)
        self.store = store
        self.messages = 0

    def send(self, buffer: Tensor) -> None:
        torch.cuda.synchronize(self.device)
        key = self._next_key()
        self.store.set(key, pickle.dumps(reduce_tensor(buffer)))
        self._wait(f"{key}/copied")  # from here on the caller may reuse or free the buffer
        self.store.delete_key(key)
        self.store.delete_key(f"{key}/copied")

    def receive(self, buffer: Tensor) -> None:
        key = self._next_key()
        self._wait(key)
        rebuild, arguments = pickle.loads(self.store.get(key))
        # argument 6 is the GPU's number, which may be another in each process
        shared = rebuild(*arguments[:6], self.device.index, *arguments[7:])
        buffer.copy_(shared)
        torch.cuda.synchronize(self.device)
        del shared
        self.store.set(f"{key}/copied", "")

    def _next_key(self) -> str:
        self.messages += 1
        return f"{self.uuid}/{self.messages}"

    def _wait(self, key: str) -> None:
        try:
            self.store.wait([key], timedelta(seconds=self.group.timeout_s))
        except RuntimeError as error:
            what = f"no answer from the other process on GPU {self.uuid}"
            raise _broken(self.group, what, error) from error

    def close(self) -> None:
        torch.cuda.ipc_collect()


# A member's end. Its calls block until the bytes have moved, or raise PublicationError.
Channel = _BroadcastChannel | _IpcChannel


def join_group(group: WeightGroup, rank: int) -> Channel:
    """Meet the other members. Raises PublicationError after `timeout_s`, naming the absent members."""
    store = _meet(group, rank)
    if group.transport == "ipc":
        return _IpcChannel(store, group)
    return _BroadcastChannel(store, group, rank)


class Membership:
    """A process's place in weight groups, one after the other."""

    channel: Channel | None = None  # None: in no group
    rank: int

    def join(self, group: WeightGroup, rank: int = 0) -> None:
        """Leave the previous group and meet the other members of a new one. Blocks until all
        members have come.
        """
        self.leave()
        self.channel, self.rank = join_group(group, rank), rank

    def leave(self) -> None:
        """Close the channel, if there is one. The other members notice the closed channel."""
        if self.channel is not None:
            self.channel.close()
            self.channel = None
