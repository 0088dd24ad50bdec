"""Listening TCP addresses of this machine, as reported by the kernel."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

LISTENS = "0A"


def listening_addresses(port: int) -> set[str]:
    """Return the local addresses on which any process listens on this TCP port."""
    found: set[str] = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            address, number = local.split(":")
            if state == LISTENS and int(number, 16) == port:
                found.add(_written(address))
    return found


def _written(address: str) -> str:
    """Return an address in the usual notation.

    The kernel writes an address as 32-bit words in the machine's byte order.
    """
    words = [int(address[start : start + 8], 16) for start in range(0, len(address), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, packed)
