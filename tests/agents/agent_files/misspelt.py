"""An environment whose method `step` is misspelled."""

from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class Game(AgentInstanceBase):
    async def stepp(self, states, **kwargs):
        return {"rewards": 1.0, "environment_feedback": "", "done": True}


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(Game)
