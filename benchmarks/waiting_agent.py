"""A single-turn agent whose environment responds after a random time.

The response time is log-normal; the slowest 1 % take at least ten times the median.
"""

import asyncio
import math
import os
import random

from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

MEDIAN, SIGMA = float(os.environ.get("OPENRLHF_BENCH_MEDIAN", "1.0")), 1.0


class Waiting(AgentInstanceBase):
    async def step(self, states, **kwargs):
        await asyncio.sleep(MEDIAN * math.exp(SIGMA * random.gauss(0, 1)))
        return {
            "rewards": states["action_text"].count("a"),
            "environment_feedback": "",
            "done": True,
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(Waiting)
