"""Makes training rows for a process reward model from GSM8K's graded model solutions.

    python examples/data/gsm8k_steps.py gsm8k/example_model_solutions.jsonl steps.jsonl
    python -m openrlhf.cli.train_prm --data.dataset steps.jsonl --data.input_key text \
        --data.label_key labels --prm.placeholder_token ки --prm.reward_tokens + - \
        --model.model_name_or_path MODEL

Each line of a solution is a step. A step is correct if its calculations are correct.
`<<16-3=13>>` is a calculation with the result that the model wrote. Most results come from a
calculator, so few are wrong. A step without a calculation that can be checked has no label. The
placeholder must be a single token of the model's tokenizer.
"""

from __future__ import annotations

import argparse
import ast
import json
import operator
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CALCULATION = re.compile(r"<<(.*?)=([^=]*?)>>")
OPERATORS: dict[type[ast.AST], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def value(text: str) -> float:
    """Evaluate an arithmetic expression.

    Raises ValueError, SyntaxError or ZeroDivisionError.
    """

    def of(node: ast.expr) -> float:
        match node:
            case ast.Constant(value=int() | float() as number):
                return float(number)
            case ast.BinOp(left, op, right) if type(op) in OPERATORS:
                return OPERATORS[type(op)](of(left), of(right))
            case ast.UnaryOp(ast.USub(), operand):
                return -of(operand)
            case _:
                raise ValueError(f"not arithmetic: {text!r}")

    return of(ast.parse(text.replace(",", "").replace("%", "/100").strip(), mode="eval").body)


def label(step: str) -> str | None:
    """Return `+` if all calculations in the step are correct, `-` if one is wrong, else None.

    A result is correct if it is within half a unit of its last written digit.
    """
    right: list[bool] = []
    for left, result in CALCULATION.findall(step):
        digits = len(result.strip().partition(".")[2])
        try:
            right.append(abs(value(left) - value(result)) <= 0.5000001 * 10**-digits)
        except (ValueError, SyntaxError, ZeroDivisionError):
            return None
    return None if not right else "+" if all(right) else "-"


def rows(lines: list[str], placeholder: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each solution of each problem, with a placeholder after each step."""
    for line in lines:
        problem = json.loads(line)
        for graded in problem.values():
            if isinstance(graded, dict):
                steps = [step for step in graded["solution"].split("\n") if step.strip()]
                text = "".join(f"\n{step} {placeholder}" for step in steps)
                yield {
                    "text": problem["question"] + text,
                    "labels": [label(step) for step in steps],
                }


def main() -> None:
    """Read the solutions, write the rows, and print the number of labels of each kind."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("solutions", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--placeholder", default="ки")
    args = parser.parse_args()
    made = list(rows(args.solutions.read_text(encoding="utf-8").splitlines(), args.placeholder))
    args.output.write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in made), encoding="utf-8"
    )
    counts = Counter(each for row in made for each in row["labels"])
    print(
        f"{len(made)} rows; steps: {counts['+']} correct, {counts['-']} wrong, {counts[None]} "
        "without a label"
    )


if __name__ == "__main__":
    main()
