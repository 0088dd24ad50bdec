"""What an agent's file imports: executors of episodes, and environments of several turns. See docs/agents.md."""

from openrlhf.rollout.agents import (
    AgentExecutorBase,
    AgentInstanceBase,
    MultiTurnAgentExecutor,
    SingleTurnAgentExecutor,
)
from openrlhf.rollout.sampling import SamplingParams

__all__ = [
    "AgentExecutorBase",
    "AgentInstanceBase",
    "MultiTurnAgentExecutor",
    "SamplingParams",
    "SingleTurnAgentExecutor",
]
