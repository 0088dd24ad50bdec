"""An agent file with two turns; the reward is the share of the letter a in the second turn."""

from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class TwoTurns(AgentInstanceBase):
    async def step(self, states, **kwargs):
        text = states["action_text"]
        done = states["turn"] == 1
        return {"rewards": text.count("a") / max(1, len(text)), "environment_feedback": "=", "done": done}


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(TwoTurns)
