"""Loads plug-ins once per process, from `--plugin` files and entry points of installed packages."""

import importlib.util
import sys
import traceback
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from importlib.metadata import entry_points
from pathlib import Path

from openrlhf.config.flags import ConfigError


def load_plugins(paths: Sequence[str]) -> None:
    """Import plug-in files, and the `openrlhf.plugins` entry points of installed packages.

    Names registered by plug-ins become valid choices for the corresponding flags. A plug-in may
    also set traits of a name in the tables of `choices`, such as the clip range of a policy loss.
    Files that this process has already imported are skipped. Raises ConfigError with the plug-in's
    error if an import fails.
    """
    _load_installed()
    for path in paths:
        file = Path(path).resolve()
        name = f"openrlhf_plugin_{file.stem}_{sha256(str(file).encode()).hexdigest()[:8]}"
        if name not in sys.modules:
            _load_file(file, name, path)


@cache
def _load_installed() -> None:
    for entry in entry_points(group="openrlhf.plugins"):
        package = entry.dist and entry.dist.name
        plugin = f"The plug-in {entry.name} = {entry.value} of the installed package {package}"
        with _failures(plugin, module=entry.module):
            entry.load()


def _load_file(file: Path, name: str, path: str) -> None:
    spec = importlib.util.spec_from_file_location(name, file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise ConfigError(f"--plugin {path} is not a readable Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # the file's dataclasses and pickles need this entry
    with _failures(f"--plugin {path}", module=name):
        spec.loader.exec_module(module)


@contextmanager
def _failures(plugin: str, *, module: str) -> Generator[None, None, None]:
    """Add the plug-in's name to an error raised in the block, and unload the failed module.

    The message ends with the lines of the plug-in that led to the error.
    """
    try:
        yield
    except Exception as error:
        sys.modules.pop(module, None)
        lines = ""
        for frame in traceback.extract_tb(error.__traceback__):
            if frame.filename != __file__ and not frame.filename.startswith("<frozen "):
                lines += f"\n  {frame.filename}, line {frame.lineno}: {frame.line}"
        raise ConfigError(f"{plugin} failed: {type(error).__name__}: {error}{lines}") from error
