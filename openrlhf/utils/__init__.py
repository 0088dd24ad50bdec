"""Names that users' reward functions and agents import; each is loaded when first asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openrlhf.remote.engines import remote_engine
    from openrlhf.remote.http_rewards import ServerError
    from openrlhf.verifiers.graders import extract_boxed_answer, grade_answer
    from openrlhf.verifiers.sandbox import run_program

__all__ = ["ServerError", "extract_boxed_answer", "grade_answer", "remote_engine", "run_program"]

_HOMES = {
    "ServerError": "openrlhf.remote.http_rewards",
    "extract_boxed_answer": "openrlhf.verifiers.graders",
    "grade_answer": "openrlhf.verifiers.graders",
    "remote_engine": "openrlhf.remote.engines",
    "run_program": "openrlhf.verifiers.sandbox",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
