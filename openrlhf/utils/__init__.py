"""Public names for users' reward functions and agents, imported lazily."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openrlhf.agents.openai_endpoint import OpenAIAgentExecutor
    from openrlhf.isolation.sandbox import run_program
    from openrlhf.rewards.graders import extract_boxed_answer, grade_answer
    from openrlhf.rewards.remote_engines import remote_engine
    from openrlhf.rewards.servers import ServerError

__all__ = [
    "OpenAIAgentExecutor",
    "ServerError",
    "extract_boxed_answer",
    "grade_answer",
    "remote_engine",
    "run_program",
]

_HOMES = {
    "OpenAIAgentExecutor": "openrlhf.agents.openai_endpoint",
    "ServerError": "openrlhf.rewards.servers",
    "extract_boxed_answer": "openrlhf.rewards.graders",
    "grade_answer": "openrlhf.rewards.graders",
    "remote_engine": "openrlhf.rewards.remote_engines",
    "run_program": "openrlhf.isolation.sandbox",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
