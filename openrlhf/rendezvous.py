"""Rendezvous stores for process groups: torch's TCPStore, listening on a single address.

By default, torch's store listens on all interfaces. The store has no password protection.
"""

import ipaddress
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

from openrlhf.reporting import warn

# URL for `init_process_group`: like env://, but with this module's store.
INIT_METHOD = "openrlhf://"
MAX_WAITING_CONNECTIONS = 2048


def host_store(host: str, port: int, *, timeout: timedelta, world_size: int | None = None) -> Store:
    """Create rank 0's store, which listens only on `host`.

    With `world_size`, wait until all ranks have connected. The store listens on all interfaces if
    `host` is a name, which may resolve to loopback here and to another address elsewhere, or if
    this machine does not have the address (for example, behind NAT). Raises RuntimeError, as torch
    does.
    """
    return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        host,
        port,
        world_size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=world_size is not None,
        master_listen_fd=_listen(host, port),
    )


def join_store(host: str, port: int, *, timeout: timedelta) -> Store:
    """Create the store of a rank other than 0, connected to rank 0's store.

    Raises RuntimeError, as torch does.
    """
    return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        host, port, is_master=False, timeout=timeout, wait_for_workers=False
    )


def _listen(host: str, port: int) -> int | None:
    """Return the file descriptor of a socket that listens on `host`.

    Returns None if the store must listen on all interfaces.
    """
    address = host
    if host == "localhost":
        address = "127.0.0.1"
    try:
        version = ipaddress.ip_address(address).version
    except ValueError:
        return None
    family = socket.AF_INET
    if version == 6:
        family = socket.AF_INET6
    try:
        listener = socket.create_server(
            (address, port), family=family, backlog=MAX_WAITING_CONNECTIONS
        )
    except OSError as error:
        warn(f"The rendezvous store {host}:{port} listens on all interfaces: {error.strerror}")
        return None
    return listener.detach()


def _meet(url: str, timeout: timedelta, **settings: Any) -> Iterator[tuple[Store, int, int]]:
    """Yield the store, the rank and the world size, as torch's env:// does."""
    rank = int(os.environ["RANK"])
    torchrun_has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if rank > 0 or torchrun_has_store:
        yield from rendezvous("env://", timeout=timeout)
        return
    world_size = int(os.environ["WORLD_SIZE"])
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    yield host_store(host, port, timeout=timeout, world_size=world_size), rank, world_size


register_rendezvous_handler(INIT_METHOD.removesuffix("://"), _meet)
