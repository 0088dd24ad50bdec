"""Users' files with registrations (`--plugin`), imported once per process."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from openrlhf.config import choices
from openrlhf.config.flags import ConfigError


def load_plugins(paths: Sequence[str]) -> None:
    """Import the files: what they register in `openrlhf.algorithms` becomes a choice of its flag.

    A file may say more of its names by `choices.extend`, such as the clip range of a policy loss.
    A file that this process has imported already is left alone. Raises ConfigError, with the error
    of the file, where it cannot be imported.
    """
    for path in paths:
        file = Path(path).expanduser().resolve()
        name = f"openrlhf_plugin_{file.stem}_{sha256(str(file).encode()).hexdigest()[:8]}"
        if name not in sys.modules:
            _load(file, name, path)
            for choice, properties in _registered():
                if choice not in choices.TABLES[type(properties)]:
                    choices.extend(choice, properties)


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


def _registered() -> Iterator[tuple[str, choices.Properties]]:
    """What flags need to know of the entries of the registries."""
    for name, e in _entries("advantages", "ADVANTAGE_ESTIMATORS"):
        groups = {"needs_groups": e.per_group, "forces_gamma_one": e.per_group}
        yield name, choices.Estimator(needs_critic=e.needs_critic, whitened=e.whiten, **groups)
    for name, e in _entries("policy_losses", "POLICY_LOSSES"):
        yield name, choices.PolicyLoss(aggregation=e.aggregation)
    for name, (level, mode) in _entries("corrections", "PRESETS"):
        yield name, choices.Correction(level=level, mode=mode)
    for name, _ in _entries("kl", "KL_ESTIMATORS"):
        yield name, choices.KLEstimator(in_reward=True, in_loss=True)


def _entries(module: str, registry: str) -> list[tuple[str, Any]]:
    """Looked up, not imported: what no file has imported has nothing new, and would cost torch."""
    table: Any = getattr(sys.modules.get(f"openrlhf.algorithms.{module}"), registry, {})
    return [(name, table[name]) for name in table]
