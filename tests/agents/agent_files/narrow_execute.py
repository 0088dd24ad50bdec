"""An executor whose method `execute` takes too few arguments."""

from openrlhf.utils.agent import AgentExecutorBase


class AgentExecutor(AgentExecutorBase):
    async def execute(self, prompt, label):
        return {"reward": 1.0}
