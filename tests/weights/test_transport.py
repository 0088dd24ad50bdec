"""A sender and receivers in a gloo group of threads: data arrives intact, and all waits end."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import timedelta

import pytest
import torch
import torch.distributed
from torch import Tensor

from openrlhf.training.devices import free_port
from openrlhf.weights.buckets import NamedTensor, TensorSpec
from openrlhf.weights.manifest import PublicationError, WeightManifest
from openrlhf.weights.receipts import WorkerReceipt, verify_receipts
from openrlhf.weights.receiver import Delivery, LoadReport, WeightReceiver
from openrlhf.weights.sender import WeightSender
from openrlhf.weights.transport import BroadcastChannel, WeightGroup, abandon, join_group

TENSORS = {name: torch.randn(50, 3) for name in "abcde"}
MANIFEST = WeightManifest(
    version=1,
    specs=tuple(TensorSpec(name=n, dtype=torch.float32, shape=(50, 3)) for n in TENSORS),
    bucket_bytes=1300,  # two tensors of 600 bytes, padded to 608
)
names = itertools.count()


def new_group(world_size: int = 2, timeout_s: float = 20.0) -> WeightGroup:
    return WeightGroup(
        host="127.0.0.1",
        port=free_port(),
        world_size=world_size,
        transport="gloo",
        name=f"group-{next(names)}",
        timeout_s=timeout_s,
    )


@dataclass
class Worker:
    """A fake of an engine worker that receives tensors without vLLM and stores the tensors."""

    receiver: WeightReceiver = field(default_factory=WeightReceiver)
    loaded: dict[str, Tensor] = field(default_factory=dict)

    def publication(self, group: WeightGroup, rank: int) -> WorkerReceipt:
        """Join the group, receive a publication, and return the receipt."""
        self.receiver.join(group, rank)
        return self.receiver.receive(MANIFEST, torch.device("cpu"), self.load)

    def load(self, delivery: Delivery) -> LoadReport:
        self.loaded.update(delivery.tensors())
        return LoadReport(unwritten=(), stale=())

    def holds(self, tensors: Mapping[str, Tensor]) -> bool:
        """Return whether the worker has loaded exactly these tensors."""
        if self.loaded.keys() != tensors.keys():
            return False
        return all(torch.equal(self.loaded[name], tensor) for name, tensor in tensors.items())


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def joined_sender(group: WeightGroup) -> WeightSender:
    sender = WeightSender()
    sender.join(group)
    return sender


def publish(
    threads: ThreadPoolExecutor, sender: WeightSender, tensors: Iterable[NamedTensor]
) -> None:
    """Send to two new workers, and check that both receive the tensors and equal hashes."""
    group = new_group(world_size=3)
    workers = [Worker(), Worker()]
    receiving = [
        threads.submit(worker.publication, group, rank) for rank, worker in enumerate(workers, 1)
    ]
    sender.join(group)
    sender.send(MANIFEST, tensors)
    receipts = [each.result(20) for each in receiving]
    verify_receipts(MANIFEST, 0, receipts)
    for rank, (worker, receipt) in enumerate(zip(workers, receipts, strict=True), 1):
        assert worker.holds(TENSORS)
        assert receipt.rank == rank
        assert len(receipt.sent_hashes) == 3
    sender.leave()


def test_every_worker_receives_all_tensors_and_the_hashes_of_the_sender(
    threads: ThreadPoolExecutor,
) -> None:
    publish(threads, WeightSender(), TENSORS.items())


def test_publication_does_not_use_the_default_torch_process_group(
    threads: ThreadPoolExecutor,
) -> None:
    before = torch.distributed.is_initialized()  # created by an earlier test in this process
    publish(threads, WeightSender(), TENSORS.items())
    assert torch.distributed.is_initialized() == before


def test_sender_reads_each_tensor_before_requesting_the_next(threads: ThreadPoolExecutor) -> None:
    """ZeRO 3 frees a gathered parameter when it gathers the next parameter."""
    scratch = torch.empty(50, 3)
    stream = ((name, scratch.copy_(tensor)) for name, tensor in TENSORS.items())
    publish(threads, WeightSender(), stream)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (dict(list(TENSORS.items())[:4]), r"zip\(\) argument 2 is shorter"),
        (TENSORS | {"f": torch.zeros(1)}, "the model has f"),
        (dict(sorted(TENSORS.items(), reverse=True)), r"manifest has a .* model has e "),
        (TENSORS | {"c": torch.zeros(3, 50)}, r"manifest has c .* model has c \(3, 50\)"),
    ],
)
def test_tensors_that_differ_from_the_manifest_fail_immediately_on_both_sides(
    threads: ThreadPoolExecutor, tensors: dict[str, Tensor], message: str
) -> None:
    group = new_group()
    receiving = threads.submit(Worker().publication, group, 1)
    sender = joined_sender(group)
    with pytest.raises(ValueError, match=message):
        sender.send(MANIFEST, tensors.items())
    assert_fails_soon(receiving)
    with pytest.raises(PublicationError, match="joined"):
        sender.send(MANIFEST, TENSORS.items())


def test_failing_loader_raises_an_error_in_the_sender_immediately(
    threads: ThreadPoolExecutor,
) -> None:
    """The receiver leaves the group, so the sender does not wait until its deadline."""

    class Failing(Worker):
        def load(self, delivery: Delivery) -> LoadReport:
            next(delivery.tensors())
            raise MemoryError("no room for the first tensor")

    group = new_group(timeout_s=60.0)
    worker = Failing()
    receiving = threads.submit(worker.publication, group, 1)
    sender = joined_sender(group)
    began = time.monotonic()
    with pytest.raises(PublicationError, match="a member died"):
        sender.send(MANIFEST, slowly(TENSORS))
    assert time.monotonic() - began < group.timeout_s
    with pytest.raises(MemoryError):
        receiving.result(20)
    assert worker.receiver.channel is None


def test_receipt_reports_tensors_that_the_loader_did_not_read(threads: ThreadPoolExecutor) -> None:
    class Lazy(Worker):
        def load(self, delivery: Delivery) -> LoadReport:
            self.loaded.update(itertools.islice(delivery.tensors(), 3))
            return LoadReport(unwritten=("layer d",), stale=())

    group = new_group()
    receiving = threads.submit(Lazy().publication, group, 1)
    joined_sender(group).send(MANIFEST, TENSORS.items())
    receipt = receiving.result(20)
    assert receipt.bucket_hashes == receipt.sent_hashes  # all bytes arrived
    with pytest.raises(PublicationError, match=r"loaded d 0 times.*loaded e 0 times.*layer d"):
        verify_receipts(MANIFEST, 0, [receipt])


def test_receiver_without_a_group_rejects_a_publication() -> None:
    with pytest.raises(RuntimeError, match="join"):
        WeightReceiver().receive(MANIFEST, torch.device("cpu"), Worker().load)


def test_sender_raises_an_error_if_a_member_does_not_receive_by_the_deadline(
    threads: ThreadPoolExecutor,
) -> None:
    group = new_group(timeout_s=5.0)
    joining = threads.submit(join_group, group, 1)
    sender = joined_sender(group)
    with pytest.raises(PublicationError, match=f"{group.name} .*gloo.*a member died"):
        sender.send(MANIFEST, TENSORS.items())
    joining.result(20).close()


def test_error_names_members_that_never_joined(threads: ThreadPoolExecutor) -> None:
    group = new_group(world_size=4, timeout_s=5.0)
    joining = threads.submit(join_group, group, 2)
    with pytest.raises(PublicationError, match=r"\[1, 3\] .* 5 s"):
        WeightSender().join(group)
    assert_fails_soon(joining)


def test_abandoning_a_group_stops_its_members_from_waiting(threads: ThreadPoolExecutor) -> None:
    group = new_group(world_size=3, timeout_s=600.0)
    joining = [threads.submit(join_group, group, rank) for rank in (0, 1)]
    abandon(group)  # rank 2 was lost before it joined
    for member in joining:
        with pytest.raises(PublicationError, match=r"\[2\] did not join.*was lost"):
            member.result(30)


def test_abandoning_a_group_without_a_store_is_ignored() -> None:
    abandon(new_group())


def test_worker_whose_trainer_never_joins_fails_after_the_deadline() -> None:
    with pytest.raises(PublicationError, match=r"rank 1 .*trainer"):
        join_group(new_group(timeout_s=0.5), 1)


def test_sender_joins_a_new_group_after_a_failure(threads: ThreadPoolExecutor) -> None:
    group = new_group()
    receiving = threads.submit(Worker().publication, group, 1)
    sender = joined_sender(group)
    with pytest.raises(ValueError):
        sender.send(MANIFEST, [])
    assert_fails_soon(receiving)
    publish(threads, sender, TENSORS.items())


def test_sender_can_join_a_new_group_after_a_member_left_during_formation(
    threads: ThreadPoolExecutor,
) -> None:
    def join_and_leave(group: WeightGroup) -> None:
        store = torch.distributed.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            group.host, group.port, is_master=False, wait_for_workers=False
        )
        prefixed = torch.distributed.PrefixStore(  # pyright: ignore[reportPrivateImportUsage]
            group.name, store
        )
        prefixed.set("joined/1", "")

    sender = WeightSender()
    group = new_group(timeout_s=2.0)
    leaving = threads.submit(join_and_leave, group)
    with pytest.raises(PublicationError):
        sender.join(group)
    leaving.result(20)
    publish(threads, sender, TENSORS.items())


class NcclGroup:
    """A fake of torch's NCCL group that reads its settings when created, and fails in `wait`."""

    class Options:
        _timeout = None

    def __init__(self, store: object, rank: int, size: int, options: Options) -> None:
        self.timeout = options._timeout
        self.blocking = os.environ["TORCH_NCCL_BLOCKING_WAIT"]
        self.aborted = False

    def broadcast(self, buffers: list[Tensor], options: object) -> NcclGroup:
        return self

    def wait(self) -> None:
        raise torch.distributed.DistBackendError("NCCL error: remote process exited\nmore")

    def abort(self) -> None:
        self.aborted = True


@pytest.mark.parametrize("users_value", [None, "0", "1"])
def test_nccl_group_uses_blocking_waits_and_raises_an_error_for_a_lost_member(
    users_value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch starts no watchdog for a group with blocking waits. Other groups keep a watchdog."""
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    if users_value:
        monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", users_value)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", NcclGroup, raising=False)
    group = replace(new_group(timeout_s=7.0), transport="nccl")
    store = torch.distributed.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    channel = BroadcastChannel(store, group, 0)
    backend = channel.backend
    assert (backend.blocking, backend.timeout) == ("1", timedelta(seconds=7))
    assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == (users_value or "0")
    with pytest.raises(PublicationError, match=r"nccl.*a member died.*NCCL error: remote") as lost:
        channel.send(torch.zeros(1))
    assert "more" not in str(lost.value)  # only the first line of torch's error
    channel.close()
    assert backend.aborted


def assert_fails_soon(receiving: Future) -> None:
    with pytest.raises(PublicationError):
        receiving.result(20)


def slowly(tensors: dict[str, Tensor]) -> Iterator[NamedTensor]:
    for name, tensor in tensors.items():
        time.sleep(0.2)
        yield name, tensor
