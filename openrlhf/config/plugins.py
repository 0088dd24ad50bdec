"""Users' files with registrations (`--plugin`), imported once per process."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from openrlhf.config.flags import ConfigError


def load_plugins(paths: Sequence[str]) -> None:
    """Import the files: they register functions in `openrlhf.algorithms`, names with `extend`.

    A file that this process has imported already is left alone. Raises ConfigError, with the error
    of the file, where it cannot be imported.
    """
    for path in paths:
        file = Path(path).expanduser().resolve()
        name = f"openrlhf_plugin_{file.stem}_{sha256(str(file).encode()).hexdigest()[:8]}"
        if name not in sys.modules:
            _load(file, name, path)


def _load(file: Path, name: str, path: str) -> None:
    spec = importlib.util.spec_from_file_location(name, file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise ConfigError(f"--plugin {path} is not a Python file that can be read.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles of the file look it up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"--plugin {path} failed: {type(error).__name__}: {error}") from error
