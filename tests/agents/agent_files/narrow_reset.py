"""An environment whose method `reset` takes no arguments."""

from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class Game(AgentInstanceBase):
    async def reset(self):
        return {"observation": "1="}

    async def step(self, states, **kwargs):
        return {"rewards": 1.0, "environment_feedback": "", "done": True}


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(Game)
