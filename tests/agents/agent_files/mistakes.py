"""An environment with methods that are not `async`. The label selects the result of `step`."""

import copy

from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

WELL = {"rewards": 1.0, "environment_feedback": "", "done": True}


def changed(params, **values):
    params = copy.copy(params)
    for name, value in values.items():
        setattr(params, name, value)
    return params


class Game(AgentInstanceBase):
    def reset(self, states):
        return None if states["label"] == "no observation" else states

    def step(self, states):
        params, last = states["sampling_params"], states["turn"] == 1
        return {
            "well": WELL,
            "none": None,
            "no rewards": {"done": True},
            "no done": {"rewards": 1.0},
            "done in words": {**WELL, "done": "no"},
            "done in a list": {**WELL, "done": [False]},
            "huge numbers": {**WELL, "done": last, "sampling_params": changed(params, seed=2**70)},
            "two rewards": {**WELL, "rewards": [1.0, 2.0]},
            "reward as text": {**WELL, "rewards": "1.0"},
            "images": {**WELL, "environment_images": ["a.png"]},
            "list": {**WELL, "environment_feedback": ["no", 3]},
            "hot": {**WELL, "done": last, "sampling_params": changed(params, temperature="hot")},
        }[states["label"]]

    def close(self):
        pass


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(Game)
