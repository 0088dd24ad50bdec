"""Starts and ends every command: parses flags, locks outputs, reports user errors.

Standard library only.
"""

import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import NoReturn, TypeVar

from openrlhf.checks import report
from openrlhf.config import machine
from openrlhf.config.commands import Command
from openrlhf.config.flags import UserError, flags_of, value_at
from openrlhf.config.options import parse_config
from openrlhf.config.places import model_in, outputs
from openrlhf.config.rules import sources
from openrlhf.doctor.packages import other_package, vllm_versions
from openrlhf.files import existing_part
from openrlhf.locks import InUseError, check_unlocked, locked
from openrlhf.reporting import alert, is_first, notice
from openrlhf.termination import ctrl_c_raises

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # set by a launcher
HELP_FLAGS = {"-h", "--help", "--help_json"}
HUB_TIMEOUT_S = 5.0
# If one of these variables is set, the Hub client uses a mirror, a proxy or no network.
HUB_VARIABLES = {
    "HF_ENDPOINT",
    "HF_HUB_OFFLINE",
    "HTTPS_PROXY",
    "https_proxy",
    "ALL_PROXY",
    "all_proxy",
}
OTHERS_WAIT_S = 10.0  # when one process fails, the launcher stops all of them
SHARED = ("events",)  # kinds of outputs that several commands may write at the same time
C = TypeVar("C", bound=Command)


def read_flags(
    root: type[C], argv: Sequence[str] | None, *, command: str, on_ray: bool = False
) -> C:
    """Return the resolved configuration from the flags in `argv` (default: this process's
    arguments).

    Exits with status 2 after a user error, or if an output cannot be written. With `on_ray`, the
    command runs its processes on Ray, so it uses the devices of a running Ray cluster, if any.
    """
    words = words_of(argv)
    prepare_process()
    with plain_ends():
        report(*other_package())
        asks_for_help = not HELP_FLAGS.isdisjoint(words)
        if on_ray and machine.ray_may_run() and not asks_for_help:
            _use_devices_of_ray()
    config = parse_flags(root, words, command=command)
    check_folders(config)
    skip_unreachable_hub(config)
    return config


def parse_flags(root: type[C], argv: Sequence[str] | None, *, command: str) -> C:
    """Return the configuration from the flags in `argv` (default: this process's arguments).

    Prints the help if the flags ask for it. Exits with status 2 after a user error.
    """
    with plain_ends(), pipe_may_close():
        return parse_config(root, words_of(argv), command=command)


@contextmanager
def pipe_may_close() -> Iterator[None]:
    """Exit with status 0 if the reader of the help, such as `head`, has closed the pipe."""
    try:
        yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None


def words_of(argv: Sequence[str] | None) -> list[str]:
    """Return a command's arguments. None means the arguments of this process."""
    if argv is None:
        return sys.argv[1:]
    return list(argv)


def _use_devices_of_ray() -> None:
    """Join a running Ray cluster, if any, and count its GPUs.

    Raises UserError if this machine has GPUs but the cluster has none.
    """
    with machine.quick_imports():
        from openrlhf.cluster.ray_cluster import join_ray

    gpus = machine.count_gpus()
    machine.cluster_gpus = join_ray()
    if gpus and machine.cluster_gpus == 0:
        raise UserError(
            f"The running Ray cluster has no GPU, but this machine has {gpus}: start Ray with "
            f"--num-gpus {gpus}, or set CUDA_VISIBLE_DEVICES= (empty) to run on CPUs."
        )


def prepare_process() -> None:
    """Set environment variables that torch and the datasets library read when they are imported."""
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    if not machine.count_gpus():
        # Let idle OpenMP threads sleep: spinning threads would take cores from other processes.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed guesses and warns


def fail(error: object) -> NoReturn:
    """Print an error without a traceback, and exit with status 2.

    The first process on a machine prints at once. The other processes wait, because most errors
    occur in all processes, and the launcher stops all processes when the first one exits.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(OTHERS_WAIT_S)
    alert(f"error: {error}".rstrip())  # a traceback ends with a line break
    leave(2)
    raise SystemExit(2)


def leave(status: int) -> None:
    """Exit one of several launched processes without unloading its libraries.

    During unloading, a Gloo thread may abort the process, which the launcher would report as a
    failure, or NCCL may wait for the other processes.
    """
    if machine.world_size() > 1:
        sys.stdout.flush()  # stderr is line-buffered
        os._exit(status)


@contextmanager
def plain_ends() -> Iterator[None]:
    """Exit with a message, and with status 2 after a user error or status 130 after Ctrl-C.

    Other exceptions keep their traceback.
    """
    try:
        with ctrl_c_raises():
            yield
    except (UserError, InUseError) as error:
        fail(error)
    except KeyboardInterrupt:
        alert("\ninterrupted")
        raise SystemExit(130) from None


def become_only_process() -> None:
    """Exit unless this process is rank 0; remove the launcher's environment variables.

    Single-process commands may also be started by `deepspeed` or `torchrun`.
    """
    if not is_first():
        raise SystemExit(0)
    for variable in list(os.environ):
        if variable in LAUNCHER or variable.startswith("TORCHELASTIC_"):
            del os.environ[variable]


@contextmanager
def single_process_command(
    root: type[C], argv: Sequence[str] | None, *, command: str, on_ray: bool = False
) -> Iterator[C]:
    """Read the flags of a command that runs as one process, and run the command in the block."""
    become_only_process()
    with multi_process_command(root, argv, command=command, on_ray=on_ray) as config:
        yield config


@contextmanager
def multi_process_command(
    root: type[C], argv: Sequence[str] | None, *, command: str, on_ray: bool = False
) -> Iterator[C]:
    """Read the flags of a command, and run the command in the block on every rank.

    Until the block exits, the command's outputs are locked, and user errors exit with status 2.
    """
    config = read_flags(root, argv, command=command, on_ray=on_ray)
    if on_ray:
        check_versions()
    with plain_ends(), writing_alone(config):
        yield config
    leave(0)


def check_folders(config: Command) -> None:
    """Exit with status 2 if any output is not writable, even an output that is written weeks later.

    Print a notice if the command will replace a model, or will write into a Ray job's copy of the
    working directory, which Ray may delete.
    """
    relative: list[str] = []
    for output in outputs(config):
        folder = Path(output.path)
        if output.is_file:
            folder = folder.parent
        existing = existing_part(folder)
        try:
            with TemporaryFile(dir=existing):
                pass
        except OSError as error:
            fail(
                f"Cannot write to {output.named}: {existing}: {error.strerror}. Choose another "
                "folder."
            )
        if not folder.is_absolute():
            relative.append(output.named)
        if output.kind == "model":
            model = model_in(output.path)
            if model:
                notice(
                    f"{output.named} already contains a model ({model}). It will be replaced when "
                    "the new one is complete. To keep both, choose another folder."
                )
    in_copy_by_ray = "working_dir_files" in Path.cwd().parts  # where Ray jobs run
    if relative and in_copy_by_ray:
        notice(
            f"{', '.join(relative)}: relative to {Path.cwd()}, this Ray job's copy of the working "
            "directory, which Ray may delete. Use absolute paths to keep the results."
        )


def skip_unreachable_hub(config: Command) -> None:
    """Fail downloads at once if the Hub is unreachable.

    By default, the Hub client retries for a minute.
    """
    if not HUB_VARIABLES.isdisjoint(os.environ):
        return
    needs_hub = False
    for flag, path in sources(config):
        is_url = "://" in path
        if is_url and flag.holds == "dataset":
            return  # the datasets library cannot download a URL if HF_HUB_OFFLINE is set
        if not is_url and not os.path.exists(path):
            needs_hub = True
    if not needs_hub:
        return
    try:
        socket.create_connection(("huggingface.co", 443), timeout=HUB_TIMEOUT_S).close()
    except OSError:
        os.environ["HF_HUB_OFFLINE"] = "1"


@contextmanager
def writing_alone(config: Command) -> Iterator[None]:
    """Hold locks on all folders and files that the command writes until the block exits.

    Raises InUseError if another process holds one of the locks. The folder of a resumed run is not
    known yet and is locked later, by `RunFolder`. Under a launcher, rank 0 holds the locks. A dry
    run only checks that no other process holds the locks.
    """
    is_dry_run = "dry_run" in flags_of(type(config)) and value_at(config, "dry_run")
    not_locked: set[str] = set(SHARED)
    if "run.dir" not in config.given or config.given.get("ckpt.load_enable"):
        not_locked.add("run")  # locked by RunFolder
    with ExitStack() as locks:
        if is_first():
            for output in outputs(config):
                place = Path(output.path)
                if output.kind in not_locked:
                    continue
                if is_dry_run:
                    check_unlocked(place, output.named, is_file=output.is_file)
                else:
                    locks.enter_context(locked(place, output.named, is_file=output.is_file))
        yield


def check_versions() -> None:
    """Exit with status 2 if vLLM is missing, unsupported or incompatible with other packages."""
    with plain_ends():
        report(*vllm_versions())
