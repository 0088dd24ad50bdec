"""Names that an agent's file imports: executors of episodes, and environments of several turns. See docs/agents.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openrlhf import utils
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

__getattr__ = utils.__getattr__  # names that load a web server or client
