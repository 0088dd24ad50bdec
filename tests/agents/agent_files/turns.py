"""An environment with the documented interface: at most three turns, with feedback."""

from typing import Any

import torch

from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class AgentInstance(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        self.step_idx = 0
        self.max_steps = 3

    async def reset(self, states: dict, **kwargs):
        return {"observation": states["observation"]}

    async def step(self, states: dict, **kwargs) -> dict[str, Any]:
        done = self.step_idx >= self.max_steps - 1
        reward = torch.tensor(float(states["action_text"].count("4")))
        self.step_idx += 1
        return {
            "rewards": reward,
            "scores": reward,
            "environment_feedback": "=5" if done else "+0=",
            "done": done,
            "sampling_params": states.get("sampling_params"),
            "extra_logs": {"steps": torch.tensor(self.step_idx)},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
