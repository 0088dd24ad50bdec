"""Restricts processes that run untrusted code, and cleans up all their descendants.

User processes and sandboxed programs use this module, which needs only the standard library and
Linux system calls that require no privileges. A restriction is permanent for the calling process
and inherited by its children. If the kernel does not support a restriction, the function that
applies the restriction raises OSError or returns False.

The parent of a confined process calls `adopt_orphans` before starting it and `end_all` afterwards.
A descendant that daemonizes, leaves its session or loses its parent then becomes a child of the
caller, so that `end_all` finds it.
"""

import ctypes
import os
import platform
import resource
import signal
import struct
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from openrlhf.isolation.system_calls import seccomp_filter

_libc = ctypes.CDLL(None, use_errno=True)
# No distribution, container or service assigns user ids from this range.
UIDS = range(0x7000_0000, 0x7FFF_FFFF)
CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_SYS_ADMIN, CAP_SYS_RESOURCE = 1, 2, 21, 24
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, PR_SET_SECUREBITS, PR_CAP_AMBIENT = 38, 22, 28, 47
NO_SETUID_FIXUP = 1 << 2  # capabilities survive a change of user, and access() honors them
CLONE_NEWUSER = 0x1000_0000
# System call numbers, the same on all platforms.
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
# The Landlock version that introduced each protection.
LANDLOCK_NETWORK, LANDLOCK_SIGNALS = 4, 6
BIND_AND_CONNECT, SOCKETS_AND_SIGNALS = 0b11, 0b11
READ = 0b1101  # Landlock: execute, read file, read folder
FILE_WRITE = 0b0110 | 1 << 14  # Landlock: read, write, truncate a file


def _call(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def _prctl(*arguments: int) -> int:
    return _call(
        _libc.prctl(*(ctypes.c_ulong(argument) for argument in (*arguments, 0, 0, 0, 0)[:5]))
    )


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent exits, so that `end_all` finds them."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent exits."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def limit_processes(count: int, uid: int) -> bool:
    """Limit this process and its descendants to `count` processes and threads in total.

    Returns False if the limit could not be set. The kernel counts processes per user and never
    limits root. A root process therefore switches to the otherwise unused user id `uid`, but keeps
    its rights over files and processes. A process of any other user enters a new user namespace,
    where the count starts at zero.
    """
    try:
        if os.geteuid() == 0 or os.geteuid() in UIDS:
            _change_user(uid)
        else:
            _enter_user_namespace()
    except OSError:
        return False
    limit(resource.RLIMIT_NPROC, count)
    return True


def limit(kind: int, value: int) -> None:
    """Set a resource's soft and hard limits to `value`, capped at the current hard limit."""
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, value))


def _change_user(uid: int) -> None:
    _prctl(PR_SET_SECUREBITS, NO_SETUID_FIXUP)
    os.setresuid(uid, uid, uid)
    # A process with either capability is exempt from the process limit.
    keep_capabilities(capabilities() - {CAP_SYS_ADMIN, CAP_SYS_RESOURCE})
    _libc.setfsuid(0)  # files that this process writes belong to root


def _enter_user_namespace() -> None:
    uid, gid = os.geteuid(), os.getegid()
    _call(_libc.unshare(CLONE_NEWUSER))
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


def capabilities() -> set[int]:
    """Return the numbers of the capabilities that this process is permitted to use."""
    status = Path("/proc/self/status").read_text()
    bits = int(status.partition("CapPrm:")[2].split()[0], 16)
    return {number for number in range(64) if bits >> number & 1}


def keep_capabilities(kept: Iterable[int]) -> None:
    """Drop all capabilities except `kept`, which child programs inherit."""
    bits = sum(1 << number for number in kept)
    low, high = bits & 0xFFFF_FFFF, bits >> 32
    _call(
        _libc.capset(
            struct.pack("II", 0x2008_0522, 0), struct.pack("6I", low, low, low, high, high, high)
        )
    )
    _prctl(PR_CAP_AMBIENT, 4)  # clear
    for number in kept:
        with suppress(OSError):  # the container may lack this capability
            _prctl(PR_CAP_AMBIENT, 2, number)


def restrict_files(*, read: Iterable[str], write: str) -> None:
    """Deny access to all files except the paths in `read` and the writable folder `write`.

    Uses Landlock. Newer Landlock versions also deny TCP connections, signals to other processes,
    and abstract sockets. Raises OSError if the kernel has no Landlock.
    """
    version = _call(_libc.syscall(LANDLOCK_CREATE, None, 0, 1))
    every = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    rules = struct.pack("QQQ", every, BIND_AND_CONNECT, SOCKETS_AND_SIGNALS)
    size = 8  # number of bytes of `rules` that this Landlock version accepts
    if version >= LANDLOCK_NETWORK:
        size = 16
    if version >= LANDLOCK_SIGNALS:
        size = 24
    ruleset = _call(_libc.syscall(LANDLOCK_CREATE, rules, size, 0))
    for path, allowed in [
        *((path, READ) for path in read),
        ("/dev/null", FILE_WRITE),
        (write, every),
    ]:
        with suppress(FileNotFoundError):
            opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
            if not os.path.isdir(path):
                allowed &= 0b0111 | 1 << 14
            _call(
                _libc.syscall(
                    LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", allowed & every, opened), 0
                )
            )
            os.close(opened)
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    _call(_libc.syscall(LANDLOCK_RESTRICT, ruleset, 0))
    os.close(ruleset)


def restrict_calls() -> None:
    """Have the kernel reject every system call that is not listed in `system_calls` (seccomp).

    Raises OSError if the kernel has no seccomp, or if the platform is not x86-64.
    """
    if platform.machine() != "x86_64":
        raise OSError(f"the list of allowed system calls is for x86-64, not {platform.machine()}")
    program = seccomp_filter()
    code = ctypes.create_string_buffer(b"".join(program))
    described = ctypes.create_string_buffer(
        struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code))
    )
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    _prctl(PR_SET_SECCOMP, 2, ctypes.addressof(described))


def end_all(child: int) -> int:
    """Kill and reap every descendant of this process. Returns the wait status of `child`."""
    statuses: dict[int, int] = {}
    while killed_some():  # the next round finds any processes forked in the meantime
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                statuses.update([ended])
        time.sleep(0.001)
    return statuses[child]


def reap_orphans(child: int) -> None:
    """Reap every ended descendant except `child`; zombies count toward the process limit."""
    with suppress(ChildProcessError):
        while (
            ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        ) and ended.si_pid != child:
            os.waitpid(ended.si_pid, 0)


def killed_some() -> bool:
    """Kill every descendant of this process.

    Returns True if there was any descendant, even a zombie.
    """
    killed = False
    for pid in descendants():
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            killed = True
    return killed


def descendants() -> list[int]:
    """Return the ids of all descendants of this process currently listed in /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # the process has ended
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found = [os.getpid()]
    for pid in found:
        found += children.get(pid, [])
    return found[1:]
