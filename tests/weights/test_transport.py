"""Sender and receiver in a gloo group of threads: what arrives, and that every wait ends."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed

from openrlhf.training.devices import free_port
from openrlhf.weights.buckets import TensorSpec, bucket_hash, bucket_nbytes, unpack
from openrlhf.weights.manifest import PublicationError, WeightManifest
from openrlhf.weights.sender import WeightSender
from openrlhf.weights.transport import BroadcastChannel, WeightGroup, join_group

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


def take(
    group: WeightGroup, rank: int, *, buckets: int | None = None
) -> tuple[dict, list[int], list[int]]:
    """Receive tensors, hashes of what came, and the sender's hashes; leave after `buckets` of them."""
    channel = join_group(group, rank)
    received, hashes = {}, []
    try:
        for bucket in MANIFEST.buckets()[:buckets]:
            buffer = torch.empty(bucket_nbytes(bucket), dtype=torch.uint8)
            channel.receive(buffer)
            hashes.append(bucket_hash(buffer))
            received |= dict(unpack(bucket, buffer))
        told = torch.empty(8 * len(hashes), dtype=torch.uint8)
        if buckets is None:
            channel.receive(told)
        return received, hashes, told.view(torch.int64).tolist()
    finally:
        channel.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def test_every_worker_gets_every_tensor_and_the_senders_hashes(threads):
    group = new_group(world_size=3)
    workers = [threads.submit(take, group, rank) for rank in (1, 2)]
    sender = WeightSender()
    sender.join(group)
    sender.send(MANIFEST, TENSORS.items())
    for worker in workers:
        received, hashes, told = worker.result(20)
        assert all(torch.equal(received[name], TENSORS[name]) for name in TENSORS)
        assert hashes == told and len(told) == 3
    sender.leave()


def test_torchs_default_group_is_not_touched(threads):
    test_every_worker_gets_every_tensor_and_the_senders_hashes(threads)
    assert not torch.distributed.is_initialized()


def test_each_tensor_is_read_before_the_next_is_asked_for(threads):
    """As with ZeRO 3, where a gathered parameter is freed again when the next one is gathered."""
    scratch = torch.empty(50, 3)
    group = new_group()
    worker = threads.submit(take, group, 1)
    sender = WeightSender()
    sender.join(group)
    sender.send(MANIFEST, ((name, scratch.copy_(tensor)) for name, tensor in TENSORS.items()))
    received, _, _ = worker.result(20)
    assert all(torch.equal(received[name], TENSORS[name]) for name in TENSORS)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (dict(list(TENSORS.items())[:4]), r"zip\(\) argument 2 is shorter"),
        (TENSORS | {"f": torch.zeros(1)}, "the model has f, which is not in the manifest"),
        (dict(sorted(TENSORS.items(), reverse=True)), r"the manifest has a .*, the model e "),
        (TENSORS | {"c": torch.zeros(3, 50)}, r"the manifest has c .*, the model c \(3, 50\)"),
    ],
)
def test_tensors_that_are_not_the_manifests_are_an_error_on_both_sides_at_once(
    threads, tensors, message
):
    group = new_group()
    worker = threads.submit(take, group, 1)
    sender = WeightSender()
    sender.join(group)
    with pytest.raises(ValueError, match=message):
        sender.send(MANIFEST, tensors.items())
    assert_fails_soon(worker)
    with pytest.raises(PublicationError, match="has not joined a group"):
        sender.send(MANIFEST, TENSORS.items())


def test_a_worker_that_leaves_is_an_error_of_the_sender_at_once(threads):
    group = new_group(timeout_s=60.0)
    worker = threads.submit(take, group, 1, buckets=1)
    sender = WeightSender()
    sender.join(group)
    began = time.monotonic()
    with pytest.raises(PublicationError, match="a member died, or did not answer in time"):
        sender.send(MANIFEST, slowly(TENSORS))
    assert time.monotonic() - began < group.timeout_s
    worker.result(20)


def test_a_worker_that_sleeps_is_an_error_of_the_sender_after_the_deadline(threads):
    group = new_group(timeout_s=5.0)
    opened = threads.submit(join_group, group, 1)
    sender = WeightSender()
    sender.join(group)
    with pytest.raises(PublicationError, match=f"weight group {group.name} .gloo.: a member died"):
        sender.send(MANIFEST, ((name, t.repeat(1, 1)) for name, t in TENSORS.items()))
    opened.result(20).close()


def test_members_that_never_come_are_named(threads):
    group = new_group(world_size=4, timeout_s=5.0)
    worker = threads.submit(join_group, group, 2)
    with pytest.raises(PublicationError, match=r"ranks \[1, 3\] did not join within 5 s"):
        WeightSender().join(group)
    assert_fails_soon(worker)


def test_a_worker_without_a_trainer_gives_up_after_the_deadline():
    with pytest.raises(PublicationError, match="rank 1 could not reach the trainer"):
        join_group(new_group(timeout_s=0.5), 1)


def test_a_sender_joins_again_after_a_failure(threads):
    sender = WeightSender()
    first = new_group()
    worker = threads.submit(take, first, 1)
    sender.join(first)
    with pytest.raises(ValueError):
        sender.send(MANIFEST, [])
    assert_fails_soon(worker)
    second = new_group()
    worker = threads.submit(take, second, 1)
    sender.join(second)
    sender.send(MANIFEST, TENSORS.items())
    assert set(worker.result(20)[0]) == set(TENSORS)


def test_a_peer_that_leaves_while_the_group_forms_is_a_publication_error_and_the_sender_joins_the_next(
    threads,
):
    def join_and_leave(group: WeightGroup) -> None:
        store = torch.distributed.TCPStore(
            group.host, group.port, is_master=False, wait_for_workers=False
        )
        torch.distributed.PrefixStore(group.name, store).set("joined/1", "")

    sender = WeightSender()
    first = new_group(timeout_s=2.0)
    peer = threads.submit(join_and_leave, first)
    with pytest.raises(PublicationError):
        sender.join(first)
    peer.result(20)
    second = new_group()
    worker = threads.submit(take, second, 1)
    sender.join(second)
    sender.send(MANIFEST, TENSORS.items())
    assert set(worker.result(20)[0]) == set(TENSORS)


class LosesAMember:
    """Torch's NCCL group, as far as a channel uses it: reads its settings when it is made, and
    fails in `wait`.
    """

    class Options:
        _timeout = None

    def __init__(self, store: object, rank: int, size: int, options: Options) -> None:
        self.timeout, self.aborted = options._timeout, False
        self.blocking = os.environ["TORCH_NCCL_BLOCKING_WAIT"]

    def broadcast(self, buffers: list[torch.Tensor], options: object) -> LosesAMember:
        return self

    def wait(self) -> None:
        raise torch.distributed.DistBackendError("NCCL error: remote process exited\nmore")

    def abort(self) -> None:
        self.aborted = True


@pytest.mark.parametrize("users", [None, "0", "1"])
def test_an_nccl_group_is_made_with_blocking_waits_and_a_lost_member_is_an_error(
    users: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch makes no watchdog for a group with blocking waits. Other groups of the process keep
    theirs.
    """
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    if users:
        monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", users)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", LosesAMember, raising=False)
    group = replace(new_group(timeout_s=7.0), transport="nccl")
    channel = BroadcastChannel(torch.distributed.HashStore(), group, 0)
    made = channel.backend
    assert (made.blocking, made.timeout) == ("1", timedelta(seconds=7))
    assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == (users or "0")
    with pytest.raises(
        PublicationError,
        match=r"\(nccl\): a member died, or did not answer in time: NCCL error: remote",
    ):
        channel.send(torch.zeros(1))
    channel.close()
    assert made.aborted


def assert_fails_soon(worker: Future) -> None:
    with pytest.raises(PublicationError):
        worker.result(20)


def slowly(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in tensors.items():
        time.sleep(0.2)
        yield name, tensor
