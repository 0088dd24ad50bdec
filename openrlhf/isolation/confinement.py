"""What a process of someone else's code may no longer do, and the end of all that it has started,
daemons too.

For user processes and sandboxed programs. Standard library only, by Linux calls that need no
privilege. A function that takes something away changes the calling process for good, and what it
starts inherits that; where the kernel lacks a call, the function raises OSError or says so. The
parent of such a process calls `adopt_orphans` before the start and `end_all` afterwards: a process
that leaves its session or loses its parent becomes our child, and is found.
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
# No distribution, container or service takes users from this range.
UIDS = range(0x7000_0000, 0x7FFF_FFFF)
CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_SYS_ADMIN, CAP_SYS_RESOURCE = 1, 2, 21, 24
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, PR_SET_SECUREBITS, PR_CAP_AMBIENT = 38, 22, 28, 47
NO_SETUID_FIXUP = 1 << 2  # a change of user keeps capabilities, and access() knows them
CLONE_NEWUSER = 0x1000_0000
# System calls, the same on all platforms.
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
# Versions of Landlock that introduced a protection.
LANDLOCK_TRUNCATE, LANDLOCK_NETWORK, LANDLOCK_SIGNALS = 3, 4, 6
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
    """Become the parent of descendants whose own parent ends, so that they can be found."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def limit_processes(count: int, uid: int) -> bool:
    """Let this process and what it starts be at most `count` processes and threads; whether that
    worked.

    The kernel counts per user and never stops root. So root becomes the otherwise unused user
    `uid`, and keeps what it may do with files and processes; anybody else gets a user namespace,
    where the counting starts anew.
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
    """Let this process have `value` of a resource, or what it may have at most, and never more
    again.
    """
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, value))


def _change_user(uid: int) -> None:
    _prctl(PR_SET_SECUREBITS, NO_SETUID_FIXUP)
    os.setresuid(uid, uid, uid)
    # Each of these capabilities lifts the limit.
    keep_capabilities(capabilities() - {CAP_SYS_ADMIN, CAP_SYS_RESOURCE})
    _libc.setfsuid(0)  # files it writes are root's


def _enter_user_namespace() -> None:
    uid, gid = os.geteuid(), os.getegid()
    _call(_libc.unshare(CLONE_NEWUSER))
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


def capabilities() -> set[int]:
    """Return the numbers of the capabilities that this process may use."""
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("CapPrm:")
    )
    bits = int(line.split()[1], 16)
    return {number for number in range(64) if bits >> number & 1}


def keep_capabilities(kept: Iterable[int]) -> None:
    """Drop all other capabilities; programs that are started get the kept ones too."""
    bits = sum(1 << number for number in kept)
    low, high = bits & 0xFFFF_FFFF, bits >> 32
    _call(
        _libc.capset(
            struct.pack("II", 0x2008_0522, 0), struct.pack("6I", low, low, low, high, high, high)
        )
    )
    _prctl(PR_CAP_AMBIENT, 4)  # clear
    for number in kept:
        with suppress(OSError):  # one that the container does not have
            _prctl(PR_CAP_AMBIENT, 2, number)


def landlock_version() -> int:
    """Return the version of the kernel's Landlock. Raises OSError if the kernel has none."""
    return _call(_libc.syscall(LANDLOCK_CREATE, None, 0, 1))


def restrict_files(*, read: Iterable[str], write: str) -> None:
    """Leave these paths readable, the folder `write` writable, and no other file within reach
    (Landlock).

    A newer Landlock also refuses TCP connections, and signals and abstract sockets that lead to
    other processes. Raises OSError if the kernel has no Landlock.
    """
    version = landlock_version()
    every = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    rules = struct.pack("Q", every)
    if version >= LANDLOCK_NETWORK:
        rules += struct.pack("Q", BIND_AND_CONNECT)
    if version >= LANDLOCK_SIGNALS:
        rules += struct.pack("Q", SOCKETS_AND_SIGNALS)
    ruleset = _call(_libc.syscall(LANDLOCK_CREATE, rules, len(rules), 0))
    for path, allowed in [
        *((path, READ) for path in read),
        ("/dev/null", FILE_WRITE),
        (write, every),
    ]:
        with suppress(FileNotFoundError):
            opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
            allowed = allowed if os.path.isdir(path) else allowed & (0b0111 | 1 << 14)
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
    """Have the kernel refuse all system calls that `system_calls` does not list (seccomp).

    Raises OSError if the kernel has no seccomp, or on another platform than x86-64.
    """
    if platform.machine() != "x86_64":
        raise OSError(f"the list of system calls is one for x86-64, not {platform.machine()}")
    program = seccomp_filter()
    code = ctypes.create_string_buffer(b"".join(program))
    described = ctypes.create_string_buffer(
        struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code))
    )
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    _prctl(PR_SET_SECCOMP, 2, ctypes.addressof(described))


def end_all(child: int) -> int:
    """Kill and reap every process below this one. Returns the wait status of `child`."""
    statuses: dict[int, int] = {}
    while killed_some():  # a later round finds what was forked meanwhile
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                statuses.update([ended])
        time.sleep(0.001)
    return statuses[child]


def reap_orphans(child: int) -> None:
    """Reap every ended process below this one but `child`: until then, each counts towards the
    limit of processes.
    """
    with suppress(ChildProcessError):
        while (
            ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        ) and ended.si_pid != child:
            os.waitpid(ended.si_pid, 0)


def killed_some() -> bool:
    """Kill every process below this one. Returns True if there was one, zombies included."""
    killed = False
    for pid in descendants():
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            killed = True
    return killed


def descendants() -> list[int]:
    """Return all processes below this one, as /proc shows them now."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # it ended meanwhile
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found = [os.getpid()]
    for pid in found:
        found += children.get(pid, [])
    return found[1:]
