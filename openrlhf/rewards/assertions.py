"""Assertions about a program that are checked outside its process.

The program computes values and never sees the expected ones.

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
        abs, all, any, bool, complex, dict, float, frozenset, int, len, list, max, min, range,
        round, set, sorted, str, sum, tuple, math.isclose,
    )
}  # fmt: skip
PLAIN = (
    ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Compare, ast.cmpop, ast.BoolOp,
    ast.boolop, ast.UnaryOp, ast.unaryop, ast.BinOp, ast.operator, ast.Subscript, ast.Slice,
    ast.IfExp, ast.keyword, ast.expr_context,
)  # fmt: skip
# With a value from the program, the result of these could fill the memory.
GROWING = (ast.Mult, ast.Pow, ast.LShift, ast.Mod)
# In an assertion these names are Python's, not functions of the program.
OWN_NAMES = {*dir(builtins), "math"}
# Characters. The time to compare some values grows with the square of their length.
LONGEST_ANSWER = 1 << 18
VALUE = "__value_{}"


class Other:
    """A value of the program that is not plain data. It equals nothing, and is true or false."""

    def __init__(self, true: bool) -> None:
        self.true = true

    def __bool__(self) -> bool:
        return self.true


class _NotOutside(Exception):
    """A test that can only be checked in the program's process."""


@dataclass(frozen=True, kw_only=True)
class Assertions:
    """Assertions and the calls of the program that they need."""

    calls: Sequence[str]  # expressions for the program's process, in the order of the tests
    tests: Sequence[CodeType]  # expressions of FUNCTIONS and of the values of `calls`

    def hold(self, answer: str) -> bool:
        """Return whether all assertions hold for `answer`, the program's values of `calls`."""
        if len(answer) > LONGEST_ANSWER:
            return False
        try:
            form, _ = json.JSONDecoder().raw_decode(answer)
            names = {VALUE.format(number): value for number, value in enumerate(plain(form))}
            for test in self.tests:
                if not eval(test, {"__builtins__": {}, **FUNCTIONS, **names}):
                    return False
        except Exception:  # no values, or for example a text where the assertion needs a number
            return False
        return True


def plain(form: Any) -> Any:
    """Return the data that a program has written as JSON, of Python's own types only.

    Tagged objects stand for tuples, sets and so on.
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
            raise ValueError(f"not plain data: {form!r:.100}")


def read_assertions(tests: str, entry: str) -> Assertions | None:
    """Return the assertions of a label's tests, or None if they need the program's process.

    `entry` is the function that a test function `check` is called with.
    """
    reader = _Reader(entry)
    try:
        for statement in ast.parse(tests).body:
            reader.read(statement)
        codes: list[CodeType] = []
        for test in reader.tests:
            expression = ast.fix_missing_locations(ast.Expression(test))
            codes.append(compile(expression, "tests", "eval"))
    except (_NotOutside, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if not codes:
        return None
    return Assertions(calls=reader.calls, tests=codes)


class _Reader(ast.NodeTransformer):
    """A reader of statements, one after the other."""

    def __init__(self, entry: str) -> None:
        self.entry = entry
        self.calls: list[str] = []
        self.tests: list[ast.expr] = []

    def read(self, statement: ast.stmt) -> None:
        """Read an assertion, a function `check` with assertions, or a statement without effect.

        Raises _NotOutside.
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
            case ast.Assign(targets=[ast.Name(id="METADATA")]):  # in HumanEval, unused
                pass
            case _:
                raise _NotOutside

    def outside(self, test: ast.expr) -> ast.expr:
        """Return an assertion with names for the values of its calls. Raises _NotOutside."""
        before = len(self.calls)
        rewritten = self.visit(test)
        if len(self.calls) > before:
            return rewritten
        for node in ast.walk(test):
            if isinstance(node, ast.Call):
                # The program may have a function with the name of one of FUNCTIONS.
                raise _NotOutside
        return rewritten

    def visit(self, node: Any) -> Any:
        """Return a part of an assertion, with calls of the program replaced. Raises _NotOutside."""
        if isinstance(node, ast.Compare):
            of_program = [side for side in (node.left, *node.comparators) if not is_constant(side)]
            if len(of_program) > 1:
                # Perhaps only the program's own classes can compare the values.
                raise _NotOutside
        if is_asked(node):
            name = VALUE.format(len(self.calls))
            self.calls.append(ast.unparse(node))
            return ast.Name(id=name, ctx=ast.Load())
        if isinstance(node, ast.Call):
            function = function_of(node)
            if function is None or (function == "range" and not is_constant(node)):
                raise _NotOutside
            return ast.Call(
                func=ast.Name(id=function, ctx=ast.Load()),
                args=[self.visit(argument) for argument in node.args],
                keywords=[self.visit(argument) for argument in node.keywords],
            )
        if not isinstance(node, PLAIN):
            raise _NotOutside
        if isinstance(node, ast.BinOp) and isinstance(node.op, GROWING) and not is_constant(node):
            raise _NotOutside
        return self.generic_visit(node)


class _Renamed(ast.NodeTransformer):
    """A renaming of a test function's parameter to the function that it stands for."""

    def __init__(self, old: str, new: str) -> None:
        self.old = old
        self.new = new

    def visit_Name(self, node: ast.Name) -> ast.Name:
        if node.id != self.old:
            return node
        return ast.Name(id=self.new, ctx=node.ctx)


def is_asked(node: ast.AST) -> bool:
    """Return whether the node is a call of the program's functions with constant arguments.

    Examples: `f(3)`, `f(3).lower()`, `Solution().f(x=3)`. Not `f(3).startswith("a")`, which would
    show the program its expected value.
    """
    if not isinstance(node, ast.Call) or function_of(node) is not None:
        return False
    values = _argument_values(node)
    if not all(map(is_constant, values)):
        return False
    match node.func:
        case ast.Name(id=name) | ast.Attribute(value=ast.Name(id=name)):
            return name not in OWN_NAMES
        case ast.Attribute(value=ast.Call(func=ast.Name(id=name)) as owner):
            return is_asked(owner) and (not values or name[0].isupper())
    return False


def function_of(call: ast.Call) -> str | None:
    """Return the name of the function if a call is one of FUNCTIONS, else None."""
    match call.func:
        case ast.Attribute(value=ast.Name(id="math"), attr="isclose"):
            return "isclose"
        case ast.Name(id=name) if name in FUNCTIONS and name != "isclose":
            return name
    return None


def is_constant(node: ast.AST) -> bool:
    """Return whether an expression needs nothing from the program."""
    if isinstance(node, ast.Call):
        return function_of(node) is not None and all(map(is_constant, _argument_values(node)))
    return isinstance(node, PLAIN) and all(map(is_constant, ast.iter_child_nodes(node)))


def _argument_values(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]
