"""An environment whose method `step` takes two arguments instead of `states`."""

from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class Game(AgentInstanceBase):
    async def step(self, observation, action):
        return {"rewards": 1.0, "environment_feedback": "", "done": True}


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(Game)
