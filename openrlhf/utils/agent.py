"""What an agent's file imports: executors of episodes, and environments of several turns. See docs/agents.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from openrlhf.agents.contract import (
    AgentExecutorBase,
    AgentInstanceBase,
    MultiTurnAgentExecutor,
    SingleTurnAgentExecutor,
)
from openrlhf.rollout.sampling import SamplingParams

if TYPE_CHECKING:
    from openrlhf.agents.openai_endpoint import OpenAIAgentExecutor

__all__ = [
    "AgentExecutorBase",
    "AgentInstanceBase",
    "MultiTurnAgentExecutor",
    "OpenAIAgentExecutor",
    "SamplingParams",
    "SingleTurnAgentExecutor",
]


def __getattr__(name: str) -> Any:
    if name != "OpenAIAgentExecutor":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from openrlhf.agents.openai_endpoint import OpenAIAgentExecutor  # loads a web server: where it is asked for

    return OpenAIAgentExecutor
