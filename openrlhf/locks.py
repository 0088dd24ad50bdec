"""Locks on folders and files: only one live process writes to each. Standard library only.

A lock is the kernel's lock (flock) of a small file, `.lock` in the folder or `.<name>.lock` beside
the file. The kernel releases the lock when the process ends, however it ends. The file says which
process holds the lock. It is removed when the lock is released normally; a file left behind by a
killed process locks nothing.
"""

import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOCK = ".lock"


class InUseError(BlockingIOError):
    """Another live process writes to a folder or file. The message names both."""


@dataclass(kw_only=True)
class _Held:
    """A lock that this process holds, and how many blocks want it."""

    descriptor: int
    blocks: int


_held: dict[Path, _Held] = {}  # by the path of the lock file


def _forget() -> None:
    """Close the copies of the locks that a fork has made: only the parent holds them."""
    for held in _held.values():
        os.close(held.descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget)


def lock_of(place: Path, *, is_file: bool = False) -> Path:
    """Return the path of the lock file of a folder, or of a file."""
    real = Path(os.path.realpath(place))
    if is_file:
        return real.with_name(f".{real.name}{LOCK}")
    return real / LOCK


@contextmanager
def locked(place: Path, named: str, *, is_file: bool = False) -> Iterator[int | None]:
    """Hold the lock of a folder, or of a file, until the block exits. The folder is made if it does
    not exist.

    A process may lock the same path more than once. Yields the descriptor of the lock, for a child
    that is to hold it too; None if the file system has no locks, which is reported on stderr.
    Raises InUseError if another process holds the lock; `named` names the path in the message, for
    example "--run.dir runs/a".
    """
    path = lock_of(place, is_file=is_file)
    held = _held.get(path)
    if held is None:
        held = _acquire(path, named)
    if held is None:
        yield None
        return
    held.blocks += 1
    try:
        yield held.descriptor
    finally:
        held.blocks -= 1
        if held.blocks == 0 and _held.get(path) is held:
            _release(path, held)


def _acquire(path: Path, named: str) -> _Held | None:
    made = _make_folder(path.parent)
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            return _without_lock(path, error)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 4096)
            os.close(descriptor)
            raise InUseError(f"{named} is in use by {_in_words(holder)}") from None
        except OSError as error:
            os.close(descriptor)
            return _without_lock(path, error)
        if _is_at(descriptor, path):
            break
        os.close(descriptor)  # its last holder has removed the file in the meantime
    os.ftruncate(descriptor, 0)
    os.write(descriptor, json.dumps(_this_process(made)).encode())
    held = _Held(descriptor=descriptor, blocks=0)
    _held[path] = held
    return held


def _make_folder(folder: Path) -> bool:
    """Make a folder, and return whether it did not exist."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        return False
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(descriptor), there)


def _without_lock(path: Path, error: OSError) -> None:
    print(
        f"[notice] {path} cannot be locked ({error.strerror}): a second run in this folder would "
        "not be detected.",
        file=sys.stderr,
    )


def _release(path: Path, held: _Held) -> None:
    """Remove the lock file, and the folder if the lock made it and nothing was written; then
    release the lock.
    """
    del _held[path]
    try:
        os.lseek(held.descriptor, 0, os.SEEK_SET)
        made = json.loads(os.read(held.descriptor, 4096))["made"]
        path.unlink()
        if made:
            path.parent.rmdir()
    except (OSError, ValueError):
        pass  # somebody has removed the folder, or has written to it
    os.close(held.descriptor)


def _this_process(made: bool) -> dict[str, Any]:
    words = [Path(sys.argv[0]).name, *sys.argv[1:2]]
    command = words[:1] if words[-1].startswith("-") else words
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "command": " ".join(command),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        "made": made,
    }


def _in_words(holder: bytes) -> str:
    try:
        told = json.loads(holder)
        host, pid = told["host"], told["pid"]
        process = f"process {pid} on {host} ({told['command']}), since {told['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process. Choose another path, or wait until it ends."
    if host == socket.gethostname() and not os.path.exists(f"/proc/{pid}"):
        process = f"a process that was started by {process} and is still running"
    return (
        f"{process}. Choose another path, wait until it ends, or end it. If its launcher was "
        "killed, its ranks keep running until you end them."
    )
