"""An environment that gets its rewards from a remote engine; the label names the engine's model."""

from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor, remote_engine


class AgentInstance(AgentInstanceBase):
    async def step(self, states, **kwargs):
        timeout = 2 if states["label"] == "slow" else None
        engine = remote_engine("helper", states["label"], timeout=timeout)
        said = await engine.chat([{"role": "user", "content": "good"}], temperature=0)
        return {"rewards": float(said == "GOOD"), "environment_feedback": "", "done": True}


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
