"""The system calls that a sandboxed program may make, and the seccomp filter for them.

Numbers and argument values are for Linux on x86-64. The list contains the calls that the
interpreter, libc and numerical libraries need for computing, threads, child processes, pipes and
files. It contains no calls that reach another process, a network or a device, that change the
owner, permissions or times of a file, or that later kernels added.
"""

import errno
import struct
from dataclasses import dataclass

ALLOWED = {
    "read": 0, "write": 1, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "poll": 7, "lseek": 8,
    "mmap": 9, "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14,
    "rt_sigreturn": 15, "pread64": 17, "pwrite64": 18, "readv": 19, "writev": 20, "access": 21,
    "pipe": 22, "select": 23, "sched_yield": 24, "mremap": 25, "msync": 26, "mincore": 27,
    "madvise": 28, "dup": 32, "dup2": 33, "pause": 34, "nanosleep": 35, "getitimer": 36,
    "alarm": 37, "setitimer": 38, "getpid": 39, "sendfile": 40, "sendto": 44, "recvfrom": 45,
    "sendmsg": 46, "recvmsg": 47, "shutdown": 48, "getsockname": 51, "getpeername": 52,
    "setsockopt": 54, "getsockopt": 55, "fork": 57, "vfork": 58, "execve": 59, "exit": 60,
    "wait4": 61, "uname": 63, "flock": 73, "fsync": 74, "fdatasync": 75, "ftruncate": 77,
    "getdents": 78, "getcwd": 79, "chdir": 80, "fchdir": 81, "rename": 82, "mkdir": 83, "rmdir": 84,
    "creat": 85, "link": 86, "unlink": 87, "symlink": 88, "readlink": 89, "umask": 95,
    "gettimeofday": 96, "getrlimit": 97, "getrusage": 98, "sysinfo": 99, "times": 100,
    "getuid": 102, "getgid": 104, "geteuid": 107, "getegid": 108, "setpgid": 109, "getppid": 110,
    "getpgrp": 111, "setsid": 112, "getgroups": 115, "getresuid": 118, "getresgid": 120,
    "getpgid": 121, "getsid": 124, "capget": 125, "rt_sigpending": 127, "rt_sigtimedwait": 128,
    "rt_sigsuspend": 130, "sigaltstack": 131, "mknod": 133, "statfs": 137, "fstatfs": 138,
    "getpriority": 140, "sched_getparam": 143, "sched_getscheduler": 145,
    "sched_get_priority_max": 146, "sched_get_priority_min": 147, "arch_prctl": 158,
    "setrlimit": 160, "gettid": 186, "readahead": 187, "getxattr": 191, "lgetxattr": 192,
    "fgetxattr": 193, "listxattr": 194, "llistxattr": 195, "flistxattr": 196, "time": 201,
    "futex": 202, "sched_getaffinity": 204, "epoll_create": 213, "getdents64": 217,
    "set_tid_address": 218, "restart_syscall": 219, "fadvise64": 221, "clock_gettime": 228,
    "clock_getres": 229, "clock_nanosleep": 230, "exit_group": 231, "epoll_wait": 232,
    "epoll_ctl": 233, "get_mempolicy": 239, "waitid": 247, "mkdirat": 258, "mknodat": 259,
    "newfstatat": 262, "unlinkat": 263, "renameat": 264, "linkat": 265, "symlinkat": 266,
    "readlinkat": 267, "faccessat": 269, "pselect6": 270, "ppoll": 271, "set_robust_list": 273,
    "splice": 275, "tee": 276, "sync_file_range": 277, "vmsplice": 278, "epoll_pwait": 281,
    "signalfd": 282, "timerfd_create": 283, "eventfd": 284, "fallocate": 285,
    "timerfd_settime": 286, "timerfd_gettime": 287, "signalfd4": 289, "eventfd2": 290,
    "epoll_create1": 291, "dup3": 292, "pipe2": 293, "preadv": 295, "pwritev": 296, "recvmmsg": 299,
    "sendmmsg": 307, "getcpu": 309, "renameat2": 316, "getrandom": 318, "memfd_create": 319,
    "execveat": 322, "membarrier": 324, "copy_file_range": 326, "preadv2": 327, "pwritev2": 328,
    "pkey_mprotect": 329, "pkey_alloc": 330, "pkey_free": 331, "statx": 332, "rseq": 334,
    "close_range": 436, "faccessat2": 439, "epoll_pwait2": 441,
}  # fmt: skip
# The newest known call that libc makes by itself. If a newer call is absent, libc falls back.
NEWEST_KNOWN = 334


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A system call that is allowed if one of its arguments, masked, has one of `values`."""

    number: int
    argument: int
    values: tuple[int, ...]
    mask: int = 0xFFFF_FFFF


READ_FILE, WRITE_FILE, READ_AND_WRITE = 0o0, 0o1, 0o2
TRUNCATE, OPEN_MODE_AND_TRUNCATE = 0o1000, 0o1003
# Opening read-only with O_TRUNC is excluded: Landlock before version 3 does not prevent it.
OPEN_VALUES = (
    READ_FILE,
    WRITE_FILE,
    READ_AND_WRITE,
    WRITE_FILE | TRUNCATE,
    READ_AND_WRITE | TRUNCATE,
)
NEW_NAMESPACES = 0x7E02_0000  # CLONE_NEW*
SEND_SIGNAL_ON_INPUT = 0o20000  # O_ASYNC
# fcntl without F_SETOWN, F_SETSIG, F_SETLEASE and F_NOTIFY, which make the kernel send signals.
FCNTL_COMMANDS = (0, 1, 2, 3, 5, 6, 7, 36, 37, 38, 1030, 1031, 1032, 1033, 1034)
TERMINAL_SETTINGS, TERMINAL_SIZE, BYTES_TO_READ, NON_BLOCKING, NO_CLOSE_ON_EXEC, CLOSE_ON_EXEC = (
    0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451,
)  # fmt: skip
PARENT_DEATH_SIGNAL, SET_NAME, GET_NAME, NAME_MEMORY = 1, 15, 16, 0x5356_4D41
CHECKED = (
    Checked(number=2, argument=1, values=OPEN_VALUES, mask=OPEN_MODE_AND_TRUNCATE),  # open
    Checked(number=257, argument=2, values=OPEN_VALUES, mask=OPEN_MODE_AND_TRUNCATE),  # openat
    Checked(
        number=16,  # ioctl
        argument=1,
        values=(
            TERMINAL_SETTINGS,
            TERMINAL_SIZE,
            BYTES_TO_READ,
            NON_BLOCKING,
            NO_CLOSE_ON_EXEC,
            CLOSE_ON_EXEC,
        ),
    ),
    # socketpair: stream sockets only, which cannot send to another address
    Checked(number=53, argument=1, values=(1,), mask=0xF),
    Checked(number=56, argument=0, values=(0,), mask=NEW_NAMESPACES),  # clone
    Checked(number=72, argument=1, values=FCNTL_COMMANDS),  # fcntl
    # prctl
    Checked(number=157, argument=0, values=(PARENT_DEATH_SIGNAL, SET_NAME, GET_NAME, NAME_MEMORY)),
    Checked(number=302, argument=0, values=(0,)),  # prlimit64: the calling process only
)
SET_FLAGS = Checked(number=72, argument=2, values=(0,), mask=SEND_SIGNAL_ON_INPUT)  # fcntl(F_SETFL)
F_SETFL = 4

LOAD, AND, EQUAL, AT_LEAST, GREATER, RETURN = 0x20, 0x54, 0x15, 0x35, 0x25, 0x06
ALLOW, ERROR, KILL = 0x7FFF_0000, 0x0005_0000, 0x8000_0000
REFUSE, ABSENT = ERROR | errno.EPERM, ERROR | errno.ENOSYS
X86_64, X32_CALLS = 0xC000_003E, 0x4000_0000
NUMBER_AT, ARCHITECTURE_AT, ARGUMENTS_AT = 0, 4, 16  # bytes in struct seccomp_data
Instruction = tuple[
    int, int, int, int
]  # code, number of instructions to skip if true, if false, operand


def seccomp_filter() -> list[bytes]:
    """Return the instructions of the filter.

    Calls that are not listed fail with EPERM, or with ENOSYS if they are newer than NEWEST_KNOWN.
    """
    program: list[Instruction] = [
        (LOAD, 0, 0, ARCHITECTURE_AT),
        (EQUAL, 1, 0, X86_64),  # call numbers differ between architectures
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER_AT),
        (AT_LEAST, 0, 1, X32_CALLS),
        (RETURN, 0, 0, KILL),
    ]
    for number in ALLOWED.values():
        program += [(EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    for call in CHECKED:
        block = _check(call)
        if call.number == SET_FLAGS.number:
            flags = _check(SET_FLAGS)
            block = [
                (LOAD, 0, 0, ARGUMENTS_AT + 8),
                (EQUAL, 0, len(flags), F_SETFL),
                *flags,
                *block,
            ]
        program += [(EQUAL, 0, len(block), call.number), *block]
    program += [(GREATER, 0, 1, NEWEST_KNOWN), (RETURN, 0, 0, ABSENT), (RETURN, 0, 0, REFUSE)]
    return [struct.pack("HBBI", *instruction) for instruction in program]


def _check(call: Checked) -> list[Instruction]:
    """Return the instructions that allow or refuse a call whose number has matched."""
    block: list[Instruction] = [
        (LOAD, 0, 0, ARGUMENTS_AT + 8 * call.argument),
        (AND, 0, 0, call.mask),
    ]
    for value in call.values:
        block += [(EQUAL, 0, 1, value), (RETURN, 0, 0, ALLOW)]
    return [*block, (RETURN, 0, 0, REFUSE)]
