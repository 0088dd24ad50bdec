"""The system calls that a sandboxed program may make, and the seccomp filter for them.

Numbers and argument values are for Linux on x86-64. The list contains the calls that the
interpreter, libc and numerical libraries need for computing, threads, child processes, pipes and
files. The list excludes calls that reach another process, a network or a device, calls that change
the owner, permissions or times of a file, and calls added by later kernels.
"""

import errno
import struct
from typing import NamedTuple

# The comment above each row of numbers names the calls in that row.
ALLOWED = (
    # read, write, close, stat, fstat, lstat, poll, lseek, mmap, mprotect, munmap, brk
    0, 1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,
    # rt_sigaction, rt_sigprocmask, rt_sigreturn, pread64, pwrite64, readv, writev, access, pipe
    13, 14, 15, 17, 18, 19, 20, 21, 22,
    # select, sched_yield, mremap, msync, mincore, madvise, dup, dup2, pause, nanosleep, getitimer
    23, 24, 25, 26, 27, 28, 32, 33, 34, 35, 36,
    # alarm, setitimer, getpid, sendfile, sendto, recvfrom, sendmsg, recvmsg, shutdown
    37, 38, 39, 40, 44, 45, 46, 47, 48,
    # getsockname, getpeername, setsockopt, getsockopt, fork, vfork, execve, exit, wait4, uname
    51, 52, 54, 55, 57, 58, 59, 60, 61, 63,
    # flock, fsync, fdatasync, ftruncate, getdents, getcwd, chdir, fchdir, rename, mkdir, rmdir
    73, 74, 75, 77, 78, 79, 80, 81, 82, 83, 84,
    # creat, link, unlink, symlink, readlink, umask, gettimeofday, getrlimit, getrusage, sysinfo
    85, 86, 87, 88, 89, 95, 96, 97, 98, 99,
    # times, getuid, getgid, geteuid, getegid, setpgid, getppid, getpgrp, setsid, getgroups
    100, 102, 104, 107, 108, 109, 110, 111, 112, 115,
    # getresuid, getresgid, getpgid, getsid, capget, rt_sigpending, rt_sigtimedwait, rt_sigsuspend
    118, 120, 121, 124, 125, 127, 128, 130,
    # sigaltstack, mknod, statfs, fstatfs, getpriority, sched_getparam, sched_getscheduler
    131, 133, 137, 138, 140, 143, 145,
    # sched_get_priority_max, sched_get_priority_min, arch_prctl, setrlimit, gettid, readahead
    146, 147, 158, 160, 186, 187,
    # getxattr, lgetxattr, fgetxattr, listxattr, llistxattr, flistxattr, time, futex
    191, 192, 193, 194, 195, 196, 201, 202,
    # sched_getaffinity, epoll_create, getdents64, set_tid_address, restart_syscall, fadvise64
    204, 213, 217, 218, 219, 221,
    # clock_gettime, clock_getres, clock_nanosleep, exit_group, epoll_wait, epoll_ctl
    228, 229, 230, 231, 232, 233,
    # get_mempolicy, waitid, mkdirat, mknodat, newfstatat, unlinkat, renameat, linkat, symlinkat
    239, 247, 258, 259, 262, 263, 264, 265, 266,
    # readlinkat, faccessat, pselect6, ppoll, set_robust_list, splice, tee, sync_file_range
    267, 269, 270, 271, 273, 275, 276, 277,
    # vmsplice, epoll_pwait, signalfd, timerfd_create, eventfd, fallocate, timerfd_settime
    278, 281, 282, 283, 284, 285, 286,
    # timerfd_gettime, signalfd4, eventfd2, epoll_create1, dup3, pipe2, preadv, pwritev, recvmmsg
    287, 289, 290, 291, 292, 293, 295, 296, 299,
    # sendmmsg, getcpu, renameat2, getrandom, memfd_create, execveat, membarrier, copy_file_range
    307, 309, 316, 318, 319, 322, 324, 326,
    # preadv2, pwritev2, pkey_mprotect, pkey_alloc, pkey_free, statx, rseq, close_range
    327, 328, 329, 330, 331, 332, 334, 436,
    # faccessat2, epoll_pwait2
    439, 441,
)  # fmt: skip
# The newest known call that libc makes on its own.
# If a newer call is missing, libc falls back to an older call.
NEWEST_KNOWN = 334


class Checked(NamedTuple):
    """A system call that is allowed if one of its arguments, after masking, is in `values`."""

    number: int
    argument: int
    values: tuple[int, ...]
    mask: int = 0xFFFF_FFFF


# O_RDONLY, O_WRONLY, O_RDWR, O_WRONLY | O_TRUNC, O_RDWR | O_TRUNC. Before version 3, Landlock does
# not prevent O_RDONLY | O_TRUNC, so this pair is excluded.
OPEN_VALUES = (0o0, 0o1, 0o2, 0o1001, 0o1002)
OPEN_MASK = 0o1003
CHECKED = (
    Checked(2, 1, OPEN_VALUES, OPEN_MASK),  # open
    Checked(257, 2, OPEN_VALUES, OPEN_MASK),  # openat
    # ioctl: TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
    Checked(16, 1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),
    Checked(53, 1, (1,), 0xF),  # socketpair: only stream sockets, which cannot send elsewhere
    Checked(56, 0, (0,), 0x7E02_0000),  # clone: no CLONE_NEW*, which create namespaces
    # fcntl without F_SETOWN, F_SETSIG, F_SETLEASE and F_NOTIFY, which make the kernel send signals
    Checked(72, 1, (0, 1, 2, 3, 5, 6, 7, 36, 37, 38, 1030, 1031, 1032, 1033, 1034)),
    # prctl: PR_SET_PDEATHSIG, PR_SET_NAME, PR_GET_NAME, PR_SET_VMA
    Checked(157, 0, (1, 15, 16, 0x5356_4D41)),
    Checked(302, 0, (0,)),  # prlimit64: only the calling process
)
FCNTL, F_SETFL = 72, 4
SET_FLAGS = Checked(FCNTL, 2, (0,), 0o20000)  # fcntl(F_SETFL) without O_ASYNC, which sends signals

LOAD, AND, EQUAL, AT_LEAST, GREATER, RETURN = 0x20, 0x54, 0x15, 0x35, 0x25, 0x06
ALLOW, ERROR, KILL = 0x7FFF_0000, 0x0005_0000, 0x8000_0000
REFUSE, ABSENT = ERROR | errno.EPERM, ERROR | errno.ENOSYS
X86_64, X32_CALLS = 0xC000_003E, 0x4000_0000
NUMBER_AT, ARCHITECTURE_AT, ARGUMENTS_AT = 0, 4, 16  # byte offsets in struct seccomp_data
# code, number of instructions to skip if true, number to skip if false, operand
Instruction = tuple[int, int, int, int]


def seccomp_filter() -> list[bytes]:
    """Return the instructions of the seccomp filter.

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
    for number in ALLOWED:
        program += [(EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    for call in CHECKED:
        block = _check(call)
        if call.number == FCNTL:
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
