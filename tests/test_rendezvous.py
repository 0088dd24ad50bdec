"""Addresses on which rendezvous stores listen.

`window_worker` checks the addresses of real groups.
"""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from openrlhf.rendezvous import host_store, join_store
from openrlhf.training.devices import free_port
from tests.listening import listening_addresses

WAIT = timedelta(seconds=30)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_store_listens_only_on_its_group_address(host: str) -> None:
    port = free_port()
    store = host_store(host, port, timeout=WAIT)
    assert listening_addresses(port) == {"::1" if ":" in host else "127.0.0.1"}
    store.set("key", "value")
    assert join_store(host, port, timeout=WAIT).get("key") == b"value"


@pytest.mark.parametrize(
    "host", [socket.gethostname(), "203.0.113.7"], ids=["a name", "an address elsewhere"]
)
def test_store_listens_on_all_interfaces_if_address_cannot_be_bound(host: str) -> None:
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        hosting = pool.submit(host_store, host, port, timeout=timedelta(seconds=1))
        client = join_store("127.0.0.1", port, timeout=WAIT)
        assert listening_addresses(port) <= {"0.0.0.0", "::"}
        client.set("key", "value")
        assert client.get("key") == b"value"
        hosting.exception()  # the error about the second address, which does not exist
