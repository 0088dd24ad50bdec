"""An environment whose label says what `step` returns; without `async`, which is not needed."""

from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

WELL = {"rewards": 1.0, "environment_feedback": "", "done": True}


class Game(AgentInstanceBase):
    def reset(self, states):
        return None if states["label"] == "no observation" else states

    def step(self, states):
        return {
            "well": WELL,
            "none": None,
            "no rewards": {"done": True},
            "no done": {"rewards": 1.0},
            "two rewards": {**WELL, "rewards": [1.0, 2.0]},
            "list": {**WELL, "environment_feedback": ["no", 3]},
            "hot": {**WELL, "done": states["turn"] == 1, "sampling_params": self.hot(states["sampling_params"])},
        }[states["label"]]

    def hot(self, params):
        params.temperature = "hot"
        return params

    def close(self):
        pass


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(Game)
