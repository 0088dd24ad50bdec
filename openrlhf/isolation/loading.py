"""Imports user files and functions, inspects their signatures and converts their results."""

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any


def plain(value: Any) -> Any:
    """Return `value` as built-in numbers, text, lists and dicts; convert tensors with `tolist`.

    Raises TypeError, naming the type, if `value` cannot be converted.
    """
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, str):
        return str(value)
    if hasattr(value, "__float__"):
        return float(value)
    kind = type(value).__qualname__
    raise TypeError(
        f"returned type {kind}; only numbers, text, lists, dicts and tensors can be returned"
    )


@cache
def load_file(path: Path) -> ModuleType:
    """Import the file at `path`, with its folder first on the import path."""
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
    name = f"user_file_{path.stem}"  # a file named math.py must not replace the math module
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader  # always true for a path that ends with .py
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def load_function(target: str) -> Callable[..., Any]:
    """Return the function at `path/to/file.py:name` or `package.module:name`."""
    place, _, name = target.rpartition(":")
    if place.endswith(".py"):
        module = load_file(Path(place).resolve())
    else:
        module = importlib.import_module(place)
    function = getattr(module, name, None)
    if not callable(function):
        names = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        known = ", ".join(names) or "none"
        raise AttributeError(f"{place} has no function {name}; its functions are: {known}")
    return function


def parameters_of(target: str) -> list[list[Any]] | None:
    """Return [name, kind, required] for each parameter, or None if there is no signature.

    Parameter kinds have the names used by `inspect`.
    """
    try:
        signature = inspect.signature(load_function(target))
    except (TypeError, ValueError):
        return None
    found: list[list[Any]] = []
    for name, parameter in signature.parameters.items():
        kind = parameter.kind.name
        is_required = parameter.default is parameter.empty and not kind.startswith("VAR")
        found.append([name, kind, is_required])
    return found


def takes(function: Callable[..., Any], name: str) -> bool:
    """Return True if a function accepts a keyword argument with this name."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def check_method(kind: type[Any], name: str, *positional: str, named: Sequence[str] = ()) -> None:
    """Raise TypeError if a method of a user's class does not accept the arguments of its calls.

    Only plain functions are checked.
    """
    method = inspect.getattr_static(kind, name)
    if not inspect.isfunction(method):
        return
    signature = inspect.signature(method, follow_wrapped=False)
    try:
        signature.bind(kind, *positional, **dict.fromkeys(named))
    except TypeError as error:
        raise TypeError(
            f"{kind.__name__}.{name}{signature} cannot be called with "
            f"({', '.join([*positional, *named])}): {error}"
        ) from None


async def awaited(value: Any) -> Any:
    """Return `value`, or its result if it is awaitable (e.g. from an `async def` function)."""
    if inspect.isawaitable(value):
        return await value
    return value
