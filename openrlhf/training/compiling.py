"""DeepSpeed's C++ operators, which torch compiles on first use on a machine."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import iglob
from pathlib import Path

from openrlhf.reporting import notice

TURNS = ".openrlhf.lock"  # a file in torch's folder that a process locks while compiling


@contextmanager
def compiling() -> Iterator[None]:
    """Let only this process compile operators until the block exits.

    During a compilation, torch keeps a file named `lock` in the operator's folder, and other
    processes wait until this file is gone. If the compiling process is killed, the file remains,
    and every later run would wait forever. Abandoned lock files are therefore removed first.
    """
    from torch.utils.cpp_extension import get_default_build_root  # slow to import

    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / TURNS).open("a") as turns:
        with suppress(OSError):  # the file system does not support locks
            fcntl.flock(turns, fcntl.LOCK_EX)
        for lock in (*folder.glob("*/lock"), *folder.glob("*/*/lock")):
            if is_abandoned(lock):
                lock.unlink(missing_ok=True)
                notice(f"Removed {lock}, which a killed compilation left behind.")
        yield


def is_abandoned(lock: Path) -> bool:
    """Return whether no process on this machine has the file open.

    Outside Linux, the result is always False.

    A process that is compiling keeps its lock file open. Returns False for another user's file,
    because that user's open files are not visible.
    """
    with suppress(OSError):  # the file no longer exists
        found = lock.stat()
        if found.st_uid != os.getuid() or not os.path.exists("/proc/self/fd"):
            return False
        for descriptor in iglob("/proc/[0-9]*/fd/*"):
            with suppress(OSError):  # the process has ended
                if os.path.samestat(os.stat(descriptor), found):
                    return False
        return True
    return False
