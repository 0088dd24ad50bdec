"""An agent with two turns, each of which begins after a random and occasionally long wait.

The reward is the share of the letter `a` in the response.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class Waiting(AgentInstanceBase):
    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        draw = random.Random(states["observation_text"] + states["action_text"])
        await asyncio.sleep(0.6 if draw.random() < 0.1 else 0.05 * draw.random())
        text = states["action_text"]
        done = states["turn"] == 1
        return {
            "rewards": text.count("a") / max(1, len(text)),
            "environment_feedback": "=",
            "done": done,
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self) -> None:
        super().__init__(Waiting)
