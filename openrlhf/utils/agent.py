"""Public names for agent files: episode executors and multi-turn environments (docs/agents.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openrlhf import utils
from openrlhf.agents.contract import AgentExecutorBase as AgentExecutorBase
from openrlhf.agents.contract import AgentInstanceBase as AgentInstanceBase
from openrlhf.agents.contract import MultiTurnAgentExecutor as MultiTurnAgentExecutor
from openrlhf.agents.contract import SingleTurnAgentExecutor as SingleTurnAgentExecutor
from openrlhf.rollout.sampling import SamplingParams as SamplingParams

if TYPE_CHECKING:
    from openrlhf.agents.openai_endpoint import OpenAIAgentExecutor as OpenAIAgentExecutor
    from openrlhf.rewards.remote_engines import remote_engine as remote_engine
    from openrlhf.rewards.servers import ServerError as ServerError

__getattr__ = utils.__getattr__  # names whose modules load a web server or client
