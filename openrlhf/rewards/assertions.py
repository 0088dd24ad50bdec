"""Checks assertions about a program outside the program's process.

The program only computes values and has no access to the expected values.

An assertion can be checked this way if all it needs from the program is the values of calls with
constant arguments:

    assert square(3) == 9                evaluate `square(3)` inside, compare with 9 outside
    assert sorted(pairs([1, 2])) == []   evaluate `pairs([1, 2])` inside, the rest outside
    assert square(square(3)) == 81       not checked outside: an argument comes from the program
    assert square(3) == cube(2)          not checked outside: both sides come from the program
"""

import ast
import builtins
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, cast

# `bytes` is excluded, because bytes(n) allocates n bytes no matter how large n is.
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
# These operations could exhaust the memory if an operand came from the program.
GROWING = (ast.Mult, ast.Pow, ast.LShift, ast.Mod)
# In an assertion, these names refer to Python's own functions, not to the program's.
OWN_NAMES = {*dir(builtins), "math"}
# Maximum length in characters. Comparing some values takes time quadratic in their length.
LONGEST_ANSWER = 1 << 18
VALUE = "__value_{}"


class Other:
    """A value that is not plain data; it equals no other value, and has a known truth value."""

    def __init__(self, true: bool) -> None:
        self.true = true

    def __bool__(self) -> bool:
        return self.true


class _NotOutside(Exception):
    """A test that can be checked only in the program's process."""


@dataclass(frozen=True, kw_only=True)
class Assertions:
    """Assertions, together with the calls to the program that they need."""

    calls: Sequence[str]  # expressions for the program's process, in the order of the tests
    tests: Sequence[CodeType]  # expressions that use FUNCTIONS and the values of `calls`

    def hold(self, answer: str) -> bool:
        """Return whether all assertions hold, given the values of `calls` as JSON in `answer`."""
        if len(answer) > LONGEST_ANSWER:
            return False
        try:
            form, _ = json.JSONDecoder().raw_decode(answer)
            names = {VALUE.format(number): value for number, value in enumerate(plain(form))}
            names |= {"__builtins__": {}, **FUNCTIONS}
            return all(eval(test, names) for test in self.tests)
        except Exception:  # values are missing or of the wrong type
            return False


# Types that JSON lacks, and their encodings, e.g. {"set": [1, 2]} or {"bytes": "00ff"}.
TAGS: Mapping[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "dict": dict,
    "iterator": iter,
    "bytes": bytes.fromhex,
    "int": lambda digits: int(digits, 16),
    "complex": lambda parts: complex(*parts),
    "other": Other,
}


def plain(form: Any) -> Any:
    """Convert the JSON that a program wrote to values of built-in types."""
    if isinstance(form, list):
        return [plain(each) for each in cast("list[Any]", form)]
    if isinstance(form, dict):
        [(tag, content)] = cast("dict[str, Any]", form).items()
        return TAGS[tag](plain(content))
    return form


def read_assertions(tests: str, entry: str) -> Assertions | None:
    """Return the assertions in a label's tests, or None if they must run in the program's process.

    `entry` is the name of the function that is passed to a test function `check`.
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
    """A visitor that collects calls and tests, one statement at a time."""

    def __init__(self, entry: str) -> None:
        self.entry = entry
        self.calls: list[str] = []
        self.tests: list[ast.expr] = []

    def read(self, statement: ast.stmt) -> None:
        """Read an assertion, a function `check` that contains assertions, or a no-op statement.

        Raises _NotOutside for any other statement.
        """
        match statement:
            case ast.Assert(test=test):
                self.tests.append(self.outside(test))
            case ast.FunctionDef(
                name="check", args=ast.arguments(args=[ast.arg(arg=candidate)])
            ) if self.entry:
                # The test function's parameter stands for the function that is passed to it.
                for node in ast.walk(statement):
                    if isinstance(node, ast.Name) and node.id == candidate:
                        node.id = self.entry
                for inner in statement.body:
                    self.read(inner)
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
                | ast.Assign(targets=[ast.Name(id="METADATA")])  # unused variable in HumanEval
            ):
                pass
            case _:
                raise _NotOutside

    def outside(self, test: ast.expr) -> ast.expr:
        """Return an assertion with its calls replaced by names. Raises _NotOutside."""
        before = len(self.calls)
        calls_something = any(isinstance(node, ast.Call) for node in ast.walk(test))
        rewritten = self.visit(test)
        if calls_something and len(self.calls) == before:
            # The program may define a function with the same name as one of FUNCTIONS.
            raise _NotOutside
        return rewritten

    def visit(self, node: Any) -> Any:
        """Return part of an assertion with its calls replaced by names. Raises _NotOutside."""
        if isinstance(node, ast.Compare):
            of_program = [side for side in (node.left, *node.comparators) if not is_constant(side)]
            if len(of_program) > 1:
                # Comparing these values may require the program's own classes.
                raise _NotOutside
        if is_asked(node):
            name = VALUE.format(len(self.calls))
            self.calls.append(ast.unparse(node))
            return ast.Name(id=name, ctx=ast.Load())
        if isinstance(node, ast.Call):
            function = function_of(node)
            if function is None or (function == "range" and not is_constant(node)):
                raise _NotOutside
            node.func = ast.Name(id=function, ctx=ast.Load())
        elif isinstance(node, ast.Name) and node.id in FUNCTIONS:
            return node
        elif not isinstance(node, PLAIN):
            raise _NotOutside
        if isinstance(node, ast.BinOp) and isinstance(node.op, GROWING) and not is_constant(node):
            raise _NotOutside
        return self.generic_visit(node)


def is_asked(node: ast.AST) -> bool:
    """Return whether the node calls one of the program's functions with constant arguments.

    Examples: `f(3)`, `f(3).lower()`, `Solution().f(x=3)`. A counterexample is
    `f(3).startswith("a")`, which would pass the expected value to the program.
    """
    if not isinstance(node, ast.Call) or function_of(node) is not None:
        return False
    arguments = [*node.args, *node.keywords]
    if not all(map(is_constant, arguments)):
        return False
    match node.func:
        case ast.Name(id=name) | ast.Attribute(value=ast.Name(id=name)):
            return name not in OWN_NAMES
        case ast.Attribute(value=ast.Call(func=ast.Name(id=name)) as owner):
            return is_asked(owner) and (not arguments or name[0].isupper())
    return False


def function_of(call: ast.Call) -> str | None:
    """Return the function's name if it is one of FUNCTIONS, else None."""
    match call.func:
        case ast.Attribute(value=ast.Name(id="math"), attr="isclose"):
            return "isclose"
        case ast.Name(id=name) if name in FUNCTIONS and name != "isclose":
            return name
    return None


def is_constant(node: ast.AST) -> bool:
    """Return whether an expression can be evaluated without the program."""
    if isinstance(node, ast.Call):
        arguments = [*node.args, *node.keywords]
        return function_of(node) is not None and all(map(is_constant, arguments))
    return isinstance(node, PLAIN) and all(map(is_constant, ast.iter_child_nodes(node)))
