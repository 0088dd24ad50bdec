"""Import of plug-ins, once per process: files of `--plugin`, and entry points of packages."""

import importlib.util
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from importlib.metadata import entry_points
from pathlib import Path

from openrlhf.config.flags import ConfigError


def load_plugins(paths: Sequence[str]) -> None:
    """Import the files, and the entry points `openrlhf.plugins` of installed packages.

    The names that they register become choices of their flags. In the tables of `choices`, a
    plug-in may set further traits of a name, such as the clip range of a policy loss. A file that
    this process has imported before is not imported again. Raises ConfigError, with the error of
    the plug-in, if a plug-in cannot be imported.
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
        package = "unknown"
        if entry.dist:
            package = entry.dist.name
        plugin = f"the installed package {package}, as the plug-in {entry.name} = {entry.value},"
        with _failures(plugin, module=entry.module):
            entry.load()


def _load_file(file: Path, name: str, path: str) -> None:
    spec = importlib.util.spec_from_file_location(name, file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise ConfigError(f"--plugin {path} is not a Python file that can be read.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles of the file need it
    with _failures(f"--plugin {path}", module=name):
        spec.loader.exec_module(module)


@contextmanager
def _failures(plugin: str, *, module: str) -> Generator[None, None, None]:
    """Put the name of the plug-in before an error in the block; forget the module that failed."""
    try:
        yield
    except Exception as error:
        sys.modules.pop(module, None)
        raise ConfigError(f"{plugin} failed: {type(error).__name__}: {error}") from error
