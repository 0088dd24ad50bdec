"""The import graph of the package's source: imports at module load time and later."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Module:
    """One source file in the package."""

    name: str  # openrlhf.trainers.ppo
    path: Path

    def __str__(self) -> str:
        return str(self.path.relative_to(ROOT))

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def room(self) -> str:
        """Return the subpackage (`trainers` for openrlhf.trainers.ppo, "" for openrlhf itself)."""
        return self.name.split(".")[1] if "." in self.name else ""

    def imports(self) -> set[str]:
        """Return all modules that this file imports anywhere.

        Imports may be at the top, inside functions, for type checkers only, or made with
        `import_module`.
        """
        return {name for node in ast.walk(self.tree) for name in _imported(node)}

    def loads(self) -> set[str]:
        """Return the modules that are imported when this module is imported."""
        return {name for node in _run_at_import(self.tree) for name in _imported(node)}

    def functions(self) -> Iterator[tuple[str, int]]:
        """Return the name and line count of every function and method."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
                yield node.name, node.end_lineno - node.lineno + 1


@cache
def package() -> dict[str, Module]:
    """Return all modules in the package, keyed by name."""
    modules = {}
    for path in sorted((ROOT / "openrlhf").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        modules[name] = Module(name, path)
    return modules


def loaded_with(name: str) -> set[str]:
    """Return everything that is loaded when a module is imported, according to our own source.

    The result contains our modules, and the top-level names of libraries.
    """
    seen: set[str] = set()
    waiting = {name}
    while waiting:
        current = waiting.pop()
        parents = {current.rsplit(".", depth)[0] for depth in range(current.count(".") + 1)}
        for each in parents - seen:
            seen.add(each)
            if each in package():
                waiting |= package()[each].loads() - seen
    return {each if each.startswith("openrlhf") else each.split(".")[0] for each in seen}


def _imported(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Import(names=names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(module=str(module), names=names):
            yield module
            yield from (f"{module}.{a.name}" for a in names if f"{module}.{a.name}" in package())
        case ast.Call(
            func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(name))]
        ):
            yield name


def _run_at_import(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from (each for other in child.orelse for each in [other, *_run_at_import(other)])
            continue
        yield child
        yield from _run_at_import(child)
