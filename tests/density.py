"""The density of the code, measured in syntax tree nodes per statement.

Docstrings, imports and annotations do not count.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

# Upper bounds for a package: mean nodes per statement, and percentage of heavy statements.
# The other bounds count expressions per 10,000 nodes.
# A comprehension with two loops counts as nested.
BOUNDS = {"mean": 8.5, "heavy": 2.2, "conditionals": 40.0, "comprehensions": 60.0, "nested": 3.0}
HEAVY = 25  # a statement with more nodes than this is heavy
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
NOT_COUNTED = (ast.expr_context, ast.Import, ast.ImportFrom)


class Counts:
    """Counts over the modules of a package."""

    def __init__(self) -> None:
        self.nodes = self.conditionals = self.comprehensions = self.nested = 0
        self.statements: list[int] = []  # nodes in each statement, excluding nested statements

    def visit(self, node: ast.AST, *, in_comprehension: bool = False) -> int:
        """Count a node and its descendants; return how many belong to the enclosing statement."""
        self.nodes += 1
        if isinstance(node, ast.IfExp):
            self.conditionals += 1
        if isinstance(node, COMPREHENSIONS):
            self.comprehensions += 1
            if in_comprehension or len(node.generators) > 1:
                self.nested += 1
            in_comprehension = True
        own = 1
        for child in _counted_children(node):
            own += self.visit(child, in_comprehension=in_comprehension)
        if isinstance(node, ast.stmt):
            self.statements.append(own)
            return 0
        return own


def _counted_children(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node's children except annotations, imports and the docstring."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "type_comment", "type_params"):
            continue
        children = value if isinstance(value, list) else [value]
        if (
            name == "body"
            and isinstance(node, DOCUMENTED)
            and ast.get_docstring(node, clean=False) is not None
        ):
            children = children[1:]
        for child in children:
            if isinstance(child, ast.AST) and not isinstance(child, NOT_COUNTED):
                yield child


def density(trees: Iterable[ast.Module]) -> dict[str, float]:
    """Return a package's value for each measure in `BOUNDS`."""
    counts = Counts()
    for tree in trees:
        counts.visit(tree)
    statements = counts.statements
    heavy = [size for size in statements if size > HEAVY]
    return {
        "mean": sum(statements) / len(statements),
        "heavy": 100 * len(heavy) / len(statements),
        "conditionals": 10_000 * counts.conditionals / counts.nodes,
        "comprehensions": 10_000 * counts.comprehensions / counts.nodes,
        "nested": 10_000 * counts.nested / counts.nodes,
    }
