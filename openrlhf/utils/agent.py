"""What an agent's file imports: executors of episodes, and environments of several turns. See docs/agents.md."""

from __future__ import annotations

import importlib
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
    from openrlhf.rewards.remote_engines import remote_engine
    from openrlhf.rewards.servers import ServerError

__all__ = [
    "AgentExecutorBase",
    "AgentInstanceBase",
    "MultiTurnAgentExecutor",
    "OpenAIAgentExecutor",
    "SamplingParams",
    "ServerError",
    "SingleTurnAgentExecutor",
    "remote_engine",
]

_HOMES = {  # of names that load a web server or client: where they are asked for
    "OpenAIAgentExecutor": "openrlhf.agents.openai_endpoint",
    "ServerError": "openrlhf.rewards.servers",
    "remote_engine": "openrlhf.rewards.remote_engines",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
