"""What every command does first: read the flags; and last: tell a user's mistake from ours.
Standard library only.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from pkgutil import resolve_name
from tempfile import TemporaryFile
from typing import NoReturn, TypeVar

from openrlhf.config import machine
from openrlhf.config.commands import VERBS, Command, Root
from openrlhf.config.flags import UserError, flags_of, toml_beside, value_at
from openrlhf.config.options import parse_config
from openrlhf.config.places import model_in, outputs
from openrlhf.locks import InUseError, locked
from openrlhf.termination import ctrl_c_raises, in_order

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # variables of a launcher
OTHERS_WAIT_S = 10.0  # a launcher ends all processes when the first one fails
SHARED = ("events",)  # kinds of places to which several commands may write at once
C = TypeVar("C", bound=Command)


def flags_or_exit(root: type[C], argv: Sequence[str], *, command: str, on_ray: bool = False) -> C:
    """The resolved configuration, whose folders can be written. A user's mistake ends the process
    with status 2.

    `on_ray`: the command places its processes with Ray, so the devices are those of the Ray that is
    running, if any.
    """
    prepare_process()
    with plain_ends():
        if on_ray and machine.ray_may_run() and not {"-h", "--help"} & set(argv):
            with machine.quick_imports():
                from openrlhf.distributed.cluster import join_ray
            gpus, machine.cluster_gpus = machine.count_gpus(), join_ray()
            if gpus and machine.cluster_gpus == 0:
                raise UserError(
                    f"The running Ray has no GPU, but this machine has {gpus}: start Ray with --num-gpus {gpus}, or set "
                    "CUDA_VISIBLE_DEVICES= (empty) for a run on CPUs."
                )
        try:
            config = parse_config(root, argv, command=command)
        except BrokenPipeError:  # the reader of --help, such as `head`, has closed the pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(0) from None
    check_folders(config)
    return config


def prepare_process() -> None:
    """Set what torch reads from the environment. Idle OpenMP threads sleep: spinning threads take
    others' cores.
    """
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    if not machine.count_gpus():
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed guesses, and warns


def fail(error: object) -> NoReturn:
    """Print an error or a sentence, without a traceback, and end the process with status 2.

    The first process of a machine prints at once. Another process waits: most mistakes are made in
    all processes, and the launcher ends the others when the first has printed.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(OTHERS_WAIT_S)
    print(f"error: {error}", file=sys.stderr)
    leave(2)
    raise SystemExit(2)


def leave(status: int) -> None:
    """End one of several processes whose work is done, without unloading its libraries.

    There Gloo's threads may abort it, and the launcher would report a failure; NCCL would wait for
    the other processes.
    """
    if machine.world_size() > 1:
        sys.stdout.flush()  # stderr is flushed line by line
        os._exit(status)


@contextmanager
def plain_ends() -> Iterator[None]:
    """A user's mistake ends the process with its message and status 2, Ctrl-C with 130, anything
    else with a traceback.
    """
    try:
        with ctrl_c_raises():
            yield
    except (UserError, InUseError) as error:
        fail(error)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        raise SystemExit(130) from None


def train_offline(config: Root, task: str) -> None:
    """Train an offline task, a built-in one or a plug-in's, as the flags say."""
    with plain_ends(), writing_alone(config):
        with (
            machine.quick_imports()
        ):  # after the flags: --help and mistakes answer without loading torch
            from openrlhf.launch.offline import run_offline
            from openrlhf.trainers import distill, kto, preference, process_reward, reward, sft  # noqa: F401  they register themselves
            from openrlhf.trainers.tasks import OFFLINE_TASKS

        with in_order():
            run_offline(OFFLINE_TASKS[task](config))
    leave(0)


def command(verb: str, module: str) -> Callable[..., None]:
    """The `main` of a command's module: parse the flags, of `argv` or of this process, and run. It
    runs if the module is the program.

    What runs is loaded after the flags, so that --help and mistakes answer at once. A command that
    one process runs may be started by `deepspeed` or `torchrun`: the first process runs it, and the
    others end at once.
    """
    about = VERBS[verb]

    def main(argv: Sequence[str] | None = None) -> None:
        words = sys.argv[1:] if argv is None else list(argv)
        if "first" in about and words and not words[0].startswith("-"):
            words.insert(0, about["first"])
        flags, name = resolve_name(about["flags"]), about["command"]
        if "run" not in about:
            return train_offline(flags_or_exit(flags, words, command=name), verb)
        if not machine.is_first():
            raise SystemExit(0)
        for variable in [
            each for each in os.environ if each in LAUNCHER or each.startswith("TORCHELASTIC_")
        ]:
            del os.environ[variable]
        on_ray = "on_ray" in about
        config = flags_or_exit(flags, words, command=name, on_ray=on_ray)
        if on_ray:
            check_versions()
        with plain_ends(), writing_alone(config):
            with machine.quick_imports():
                run = resolve_name(about["run"])
            run(config)

    if module == "__main__":
        main()
    return main


STACKS: dict[str, dict[str, str]] = toml_beside(__file__, "stacks.toml")


def check_folders(config: Command) -> None:
    """Exit with status 2 if an output that the command writes at its end, perhaps weeks later,
    cannot be written.

    Print a notice if the command will replace a model.
    """
    relative: list[str] = []
    for output in outputs(config):
        folder = Path(output.path)
        folder = folder.parent if output.is_file else folder
        there = next(
            place
            for place in (folder.absolute(), *folder.absolute().parents)
            if os.path.exists(place)
        )
        try:
            with TemporaryFile(dir=there):
                pass
        except OSError as error:
            fail(
                f"{output.named} cannot be written to: {there}: {error.strerror}. Choose another folder."
            )
        if not folder.is_absolute():
            relative.append(output.named)
        if output.kind == "model" and (model := model_in(output.path)) and machine.is_first():
            print(
                f"[notice] {output.named} has a model ({model}). It is replaced when the new one is complete. To keep "
                "both, choose another folder.",
                file=sys.stderr,
            )
    if (
        relative and "working_dir_files" in Path.cwd().parts
    ):  # where Ray keeps the working directories of jobs
        print(
            f"[notice] {', '.join(relative)}: relative to {Path.cwd()}, the copy of the working directory that Ray made "
            "for this job and may delete. Absolute paths outlive it.",
            file=sys.stderr,
        )


@contextmanager
def writing_alone(config: Command) -> Iterator[None]:
    """Hold the locks on the folders and files that the command writes to until the block exits.

    Raises InUseError if another process holds one. Only `RunFolder` knows the folder of a resumed
    run, and locks it. Under a launcher, the first process holds the locks; a dry run needs none.
    """
    dry = "dry_run" in flags_of(type(config)) and value_at(config, "dry_run")
    with ExitStack() as locks:
        for output in outputs(config) if machine.is_first() and not dry else ():
            resumed = output.kind == "run" and (
                "run.dir" not in config.given or config.given.get("ckpt.load_enable")
            )
            if output.kind in SHARED or resumed:
                continue
            locks.enter_context(locked(Path(output.path), output.named, is_file=output.is_file))
        yield


def check_versions() -> None:
    """End with status 2, and what to install, if vLLM is missing or unsupported, or other packages
    do not go with it.
    """
    from packaging.specifiers import SpecifierSet

    remedy = f"install a supported one with: pip install -e '.[{'vllm' if machine.count_gpus() else 'cpu'}]' (see the README)"
    if (vllm := machine.installed("vllm")) is None:
        fail(f"vllm is not installed: {remedy}")

    def allows(versions: str, version: str) -> bool:
        return SpecifierSet(versions).contains(version, prereleases=True)

    there = f"{vllm.name} {vllm.version}"
    needs = next((STACKS[versions] for versions in STACKS if allows(versions, vllm.version)), None)
    if needs is None:
        fail(f"{there} is installed, supported is {' or '.join(STACKS)}: {remedy}")
    wrong = [
        f"{there} works with {name} {versions}, but {found.version if found else 'none'} is installed: "
        "install such a one, or another vLLM (docs/gpu.md, Versions of vLLM)"
        for name, versions in needs.items()
        if (found := machine.installed(name)) is None or not allows(versions, found.version)
    ]
    if wrong:
        fail("\n".join(wrong))
