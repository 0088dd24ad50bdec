"""Functions that misbehave, and functions that return information about their process."""

import asyncio
import ctypes
import marshal
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

counter = 0
loop = None


def echo(*args, **kwargs):
    return [list(args), kwargs]


def process():
    return os.getpid()


def count():
    global counter
    counter += 1
    return counter


def environment(name):
    return os.environ.get(name)


def modules():
    return sorted(sys.modules)


def shout():
    print("printed to stdout", flush=True)
    os.write(1, b"written to descriptor 1\n")
    print("printed to stderr", file=sys.stderr)
    return "quiet"


async def loop_stays():
    global loop
    first, loop = loop is None, loop or asyncio.get_running_loop()
    await asyncio.sleep(0)
    return first or loop is asyncio.get_running_loop()


def nap(seconds):
    time.sleep(seconds)
    return os.getpid()


def hang():
    time.sleep(1000)


def hold_the_interpreter():
    return 9**9**9


def hang_with_child(path):
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    with open(path, "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
    return 9**9**9


def leave_at_once():
    os._exit(7)


def leave():
    sys.exit("that is all")


def remove_and_leave(log):
    os.unlink(log)
    os._exit(7)


def crash():
    ctypes.string_at(0)


def fill_memory():
    return len(bytearray(1 << 40))


def fill_memory_slowly():
    hoard = []
    while True:
        hoard.append(bytearray(1 << 24))


def fail():
    raise ValueError("no way")


def fail_with_a_failure_of_its_own():
    error = ValueError("no way")
    error.failure = "odd"
    raise error


def opaque():
    return {"rewards": [object()]}


def close_everything():
    os.closerange(3, 4096)
    time.sleep(1000)


def write_to_every_socket(message=b"?"):
    framed = len(message).to_bytes(8, "big") + message
    for descriptor in Path("/proc/self/fd").iterdir():
        if descriptor.is_socket():
            os.write(int(descriptor.name), framed)
    time.sleep(1000)


def write_none_to_every_socket():
    write_to_every_socket(marshal.dumps(None))


def write_dict_to_every_socket():
    write_to_every_socket(marshal.dumps({"kind": "done"}))


def huge():
    return bytes(1 << 29)


def fork_and_return():
    os.fork()
    return count()


def fork_bomb(pids):
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            if os.fork() == 0:
                os.setsid()
                with open(pids, "a") as file:
                    file.write(f"{os.getpid()}\n")
                time.sleep(0.1)
        except OSError:
            time.sleep(30)


def fork_until_refused(count):
    for forked in range(count):
        try:
            if os.fork() == 0:
                time.sleep(30)
                os._exit(0)
        except OSError:
            return forked
    return count


def use_files(secret, new):
    with open(new, "w") as file:
        file.write("mine")
    with open(secret) as file:
        return [os.getuid(), file.read(), os.stat(new).st_uid]


async def hang_in_await():
    await asyncio.sleep(1000)


def leak(count):
    for _ in range(count):
        if os.fork() == 0:
            time.sleep(1000)
            os._exit(0)
    return os.getpid()


def read_an_empty_pipe():
    end, _other = os.pipe()
    os.set_blocking(end, False)
    return os.read(end, 1)


def babble(part, characters):
    print(f"part {part}\n" + "x" * characters, end="", flush=True)


def meet(folder):
    """Wait until two processes run this function at the same time."""
    open(os.path.join(folder, f"{os.getpid()}.met"), "w").close()
    while sum(name.endswith(".met") for name in os.listdir(folder)) < 2:
        time.sleep(0.01)
    return os.getpid()


def stop_everybody() -> None:
    """Stop every process in our process group."""
    os.kill(0, signal.SIGSTOP)


def kill_my_parent() -> None:
    """Kill the process that monitors this process."""
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)


def leave_a_daemon_and_kill_my_group(pids: str) -> None:
    """Start a process in its own session, then kill every process in our process group."""
    daemon = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    Path(pids).write_text(str(daemon.pid))
    os.killpg(0, signal.SIGKILL)


def start_in_background(count: int) -> int:
    """Start processes from a shell, and do not wait for them."""
    for _ in range(count):
        subprocess.run("true &", shell=True, check=True)
    return count
