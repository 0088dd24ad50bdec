"""Locks that let only one live process write to a folder or file. Standard library only.

A lock is a kernel lock (flock) on a small file: `.lock` in the folder, or `.<name>.lock` beside the
file. The kernel releases the lock when the process ends for any reason. The lock file names the
process that holds the lock. The lock file is removed on a normal release; a file left behind by a
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

from openrlhf.reporting import notice

LOCK = ".lock"
LONGEST_RECORD_BYTES = 4096


class InUseError(BlockingIOError):
    """Error for a folder or file that another live process writes to.

    The message names the path and the process.
    """


@dataclass(kw_only=True)
class _Held:
    """A lock that this process holds."""

    descriptor: int
    created_folder: bool  # True if the lock's folder did not exist
    blocks: int = 0  # number of open `locked` blocks that use the lock


_held: dict[Path, _Held] = {}  # lock file → lock


def _close_inherited_locks() -> None:
    """Close the descriptors copied by a fork, so that only the parent holds the locks."""
    for held in _held.values():
        os.close(held.descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_inherited_locks)


def lock_of(place: Path, *, is_file: bool = False) -> Path:
    """Return the lock file for a folder or a file."""
    real = Path(os.path.realpath(place))
    if is_file:
        return real.with_name(f".{real.name}{LOCK}")
    return real / LOCK


@contextmanager
def locked(place: Path, named: str, *, is_file: bool = False) -> Iterator[int | None]:
    """Hold the lock on a folder or a file until the block exits.

    Creates the folder if it does not exist. A process may lock the same path more than once. Yields
    the lock's descriptor, which a child process can inherit to hold the lock too. If the file
    system does not support locks, prints a notice and yields None. Raises InUseError if another
    process holds the lock; the message refers to the path as `named`, e.g. "--run.dir runs/a".
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


def check_unlocked(place: Path, named: str, *, is_file: bool = False) -> None:
    """Raise InUseError if another process holds the lock on a folder or a file.

    Does not create files or keep a lock. The message refers to the path as `named`.
    """
    path = lock_of(place, is_file=is_file)
    if path in _held:
        return
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return  # no process holds the lock, or the path cannot be locked
    try:
        # Use a shared lock, so that simultaneous checks do not conflict.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _in_use(descriptor, named) from None
    except OSError:
        pass  # the file system does not support locks; `locked` prints a notice
    finally:
        os.close(descriptor)


def _acquire(path: Path, named: str) -> _Held | None:
    try:
        path.parent.mkdir(parents=True)
        created_folder = True
    except FileExistsError:
        created_folder = False
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            _report_no_lock(path, error)
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            error = _in_use(descriptor, named)
            os.close(descriptor)
            raise error from None
        except OSError as error:
            os.close(descriptor)
            _report_no_lock(path, error)
            return None
        if _is_open_file(descriptor, path):
            break
        os.close(descriptor)  # the previous holder removed the file before this process locked it
    os.ftruncate(descriptor, 0)
    record = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "command": running_command(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    os.write(descriptor, json.dumps(record).encode())
    held = _Held(descriptor=descriptor, created_folder=created_folder)
    _held[path] = held
    return held


def _in_use(descriptor: int, named: str) -> InUseError:
    """Return an error that names the process recorded in the open lock file."""
    record = os.read(descriptor, LONGEST_RECORD_BYTES)
    return InUseError(f"{named} is in use by {_describe_holder(record)}")


def _is_open_file(descriptor: int, path: Path) -> bool:
    """Return whether `descriptor` refers to the file that is now at `path`."""
    try:
        at_path = os.stat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(descriptor), at_path)


def _report_no_lock(path: Path, error: OSError) -> None:
    notice(
        f"Cannot lock {path} ({error.strerror}). A second run in this folder will not be detected."
    )


def _release(path: Path, held: _Held) -> None:
    """Unlock; remove the lock file, and its folder if the lock created it and it is empty."""
    del _held[path]
    try:
        path.unlink()
        if held.created_folder:
            path.parent.rmdir()
    except OSError:
        pass  # the folder contains files or has been removed
    os.close(held.descriptor)


def running_command() -> str:
    """Return the name of the program that this process runs, with its subcommand."""
    command = Path(sys.argv[0]).name
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
        command += f" {sys.argv[1]}"
    return command


def _describe_holder(record: bytes) -> str:
    """Describe the process that wrote a lock file, and what the user can do."""
    try:
        holder = json.loads(record)
        host, pid = holder["host"], holder["pid"]
        process = f"process {pid} on {host} ({holder['command']}), since {holder['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process. Choose another path, or wait until that process ends."
    if host == socket.gethostname() and not os.path.exists(f"/proc/{pid}"):
        process = f"a running process that was started by {process}"
    return (
        f"{process}. Choose another path, wait until the process ends, or stop it. If its launcher "
        "was killed, its ranks keep running until you stop them."
    )
