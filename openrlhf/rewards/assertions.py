"""Assertions about a program that are checked outside its process: the program computes values and
never sees what is expected.

An assertion can be checked this way if it only needs the values of the program's calls with
constant arguments:

    assert square(3) == 9                asks `square(3)`; outside, its value is compared with 9
    assert sorted(pairs([1, 2])) == []   asks `pairs([1, 2])`; the rest is computed outside
    assert square(square(3)) == 81       is not checked outside: an argument comes from the program
    assert square(3) == cube(2)          is not checked outside: both sides come from the program
"""

import ast
import builtins
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, cast

# Not `bytes`: bytes(n) allocates n bytes, however large n is.
FUNCTIONS: Mapping[str, Any] = {
    function.__name__: function
    for function in (
        abs, all, any, bool, complex, dict, float, frozenset, int, len, list, max, min, range, round, set, sorted, str,
        sum, tuple, math.isclose,
    )
}  # fmt: skip
PLAIN = (
    ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Compare, ast.cmpop, ast.BoolOp, ast.boolop, ast.UnaryOp,
    ast.unaryop, ast.BinOp, ast.operator, ast.Subscript, ast.Slice, ast.IfExp, ast.keyword, ast.expr_context,
)  # fmt: skip
GROWING = (
    ast.Mult,
    ast.Pow,
    ast.LShift,
    ast.Mod,
)  # with a value from the program, the result could fill the memory
OWN_NAMES = {
    *dir(builtins),
    "math",
}  # in an assertion these names are Python's, not functions of the program
MOST_ANSWER = (
    1 << 18
)  # characters; the time to compare some values grows with the square of their length
VALUE = "__value_{}"


class Other:
    """A value of the program that is not plain data: it equals nothing, and is true or false."""

    def __init__(self, true: bool) -> None:
        self.true = true

    def __bool__(self) -> bool:
        return self.true


class _NotOutside(Exception):
    """A test that can only be checked in the program's process."""


@dataclass(frozen=True, kw_only=True)
class Assertions:
    """Assertions and the calls that they need: expressions for the program's process, in the order
    of the tests.
    """

    calls: Sequence[str]
    tests: Sequence[CodeType]  # expressions of FUNCTIONS and of the values of `calls`

    def hold(self, answer: str) -> bool:
        """Return whether all assertions are true of the values of `calls`, which the program has
        written.
        """
        if len(answer) > MOST_ANSWER:
            return False
        try:
            values = plain(json.JSONDecoder().raw_decode(answer)[0])
            names = {VALUE.format(place): value for place, value in enumerate(values)}
            return all(
                eval(test, {"__builtins__": {}, **FUNCTIONS, **names}) for test in self.tests
            )
        except Exception:  # no values, or such as a text where the assertion needs a number
            return False


def plain(form: Any) -> Any:
    """Return the data that a program has written as JSON, of Python's own types only: tagged
    objects are tuples, sets and so on.
    """
    match form:
        case list():
            return [plain(each) for each in cast("list[Any]", form)]
        case {"tuple": items}:
            return tuple(plain(items))
        case {"set": items}:
            return set(plain(items))
        case {"frozenset": items}:
            return frozenset(plain(items))
        case {"dict": entries}:
            return dict(plain(entries))
        case {"int": str(digits)}:
            return int(digits, 16)
        case {"other": bool(true)}:
            return Other(true)
        case {"iterator": items}:
            return iter(plain(items))
        case {"bytes": text}:
            return bytes.fromhex(text)
        case {"complex": [float(real), float(imaginary)]}:
            return complex(real, imaginary)
        case None | bool() | int() | float() | str():
            return form
        case _:
            raise ValueError(f"no plain data: {form!r:.100}")


def read_assertions(tests: str, entry: str) -> Assertions | None:
    """Return the assertions of a label's tests; None if some of them can only be checked in the
    program's process.

    `entry`: the function that a test function `check` is called with.
    """
    reader = _Reader(entry)
    try:
        for statement in ast.parse(tests).body:
            reader.read(statement)
        codes = [
            compile(ast.fix_missing_locations(ast.Expression(test)), "tests", "eval")
            for test in reader.tests
        ]
    except (_NotOutside, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return Assertions(calls=reader.calls, tests=codes) if codes else None


class _Reader:
    """Reads statements one after the other."""

    def __init__(self, entry: str) -> None:
        self.entry = entry
        self.calls: list[str] = []
        self.tests: list[ast.expr] = []

    def read(self, statement: ast.stmt) -> None:
        """Take an assertion, a function `check` with assertions, or a statement that has no part in
        them. Raises _NotOutside.
        """
        match statement:
            case ast.Assert(test=test):
                self.tests.append(self.outside(test))
            case ast.FunctionDef(
                name="check", args=ast.arguments(args=[ast.arg(arg=candidate)])
            ) if self.entry:
                for inner in statement.body:
                    self.read(_Renamed(candidate, self.entry).visit(inner))
            case ast.Expr(
                value=ast.Call(
                    func=ast.Name(id="check"), args=[ast.Name(id=self.entry)], keywords=[]
                )
            ):
                pass
            case (
                ast.Expr(value=ast.Constant())
                | ast.Pass()
                | ast.Import(names=[ast.alias(name="math", asname=None)])
            ):
                pass
            case ast.Assign(targets=[ast.Name(id="METADATA")]):  # of HumanEval: nothing reads it
                pass
            case _:
                raise _NotOutside

    def outside(self, test: ast.expr) -> ast.expr:
        """Return an assertion with names for the values of its calls. Raises _NotOutside."""
        before = len(self.calls)
        found = self._rewritten(test)
        asks = len(self.calls) > before
        if not asks and any(isinstance(node, ast.Call) for node in ast.walk(test)):
            raise _NotOutside  # the program may have a function with the name of one of FUNCTIONS
        return found

    def _rewritten(self, node: Any) -> Any:
        """Return a part of an assertion, with calls of the program replaced. Raises _NotOutside."""
        if isinstance(node, ast.Compare):
            of_program = [side for side in (node.left, *node.comparators) if not is_constant(side)]
            if len(of_program) > 1:
                raise _NotOutside  # the values may be such that only the program's own classes can compare them
        if is_asked(node):
            name = VALUE.format(len(self.calls))
            self.calls.append(ast.unparse(node))
            return ast.Name(id=name, ctx=ast.Load())
        if isinstance(node, ast.Call):
            function = function_of(node)
            if function is None or (function == "range" and not is_constant(node)):
                raise _NotOutside
            node = ast.Call(
                func=ast.Name(id=function, ctx=ast.Load()), args=node.args, keywords=node.keywords
            )
        elif not isinstance(node, PLAIN):
            raise _NotOutside
        if isinstance(node, ast.BinOp) and isinstance(node.op, GROWING) and not is_constant(node):
            raise _NotOutside
        if isinstance(node, ast.Call):
            node.args = [self._rewritten(argument) for argument in node.args]
            node.keywords = [self._rewritten(argument) for argument in node.keywords]
            return node
        for name, value in ast.iter_fields(node):
            if isinstance(value, list):
                setattr(
                    node, name, [None if each is None else self._rewritten(each) for each in value]
                )
            elif isinstance(value, ast.AST):
                setattr(node, name, self._rewritten(value))
        return node


class _Renamed(ast.NodeTransformer):
    """Renaming of a test function's parameter to the function that it stands for."""

    def __init__(self, old: str, new: str) -> None:
        self.old, self.new = old, new

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(id=self.new, ctx=node.ctx) if node.id == self.old else node


def is_asked(node: ast.AST) -> bool:
    """Return whether the node is a call of the program's with constant arguments: `f(3)`,
    `f(3).lower()`, `Solution().f(x=3)`.

    Not `f(3).startswith("a")`, which tells the program what its value should be.
    """
    if not isinstance(node, ast.Call) or function_of(node) is not None:
        return False
    values = [*node.args, *(keyword.value for keyword in node.keywords)]
    if not all(map(is_constant, values)):
        return False
    match node.func:
        case ast.Name(id=name) | ast.Attribute(value=ast.Name(id=name)):
            return name not in OWN_NAMES
        case ast.Attribute(value=ast.Call(func=ast.Name(id=name)) as owner):
            return is_asked(owner) and (not values or name[0].isupper())
    return False


def function_of(call: ast.Call) -> str | None:
    """Return the name of a call of one of FUNCTIONS, else None."""
    match call.func:
        case ast.Attribute(value=ast.Name(id="math"), attr="isclose"):
            return "isclose"
        case ast.Name(id=name) if name in FUNCTIONS and name != "isclose":
            return name
    return None


def is_constant(node: ast.AST) -> bool:
    """Return whether an expression needs nothing from the program."""
    if isinstance(node, ast.Call):
        values = [*node.args, *(keyword.value for keyword in node.keywords)]
        return function_of(node) is not None and all(map(is_constant, values))
    return isinstance(node, PLAIN) and all(map(is_constant, ast.iter_child_nodes(node)))
