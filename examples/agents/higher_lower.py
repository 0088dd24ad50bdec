"""A multi-turn environment in which the policy guesses the number in the label.

    --train.agent_func_path examples/agents/higher_lower.py --data.label_key answer \
        --rollout.max_turns 8

The environment responds to a wrong guess with `higher` or `lower`. A correct first guess earns 1,
and each further turn costs 0.1. Text without a number ends the episode with reward 0.
"""

from __future__ import annotations

import re
from typing import Any

from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class HigherLower(AgentInstanceBase):
    """The environment for one game."""

    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        said = re.search(r"\d+", states["action_text"])
        if said is None:
            return {
                "rewards": 0.0,
                "environment_feedback": "",
                "done": True,
                "extra_logs": {"guesses": states["turn"]},
            }
        guess, answer = int(said.group()), int(states["label"])
        right = guess == answer
        return {
            "rewards": max(0.1, 1 - 0.1 * states["turn"]) if right else 0.0,
            "scores": float(right),
            "environment_feedback": "" if right else " higher: " if guess < answer else " lower: ",
            "done": right,
            "extra_logs": {"guesses": states["turn"] + 1},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    """The class that --train.agent_func_path requires."""

    def __init__(self) -> None:
        super().__init__(HigherLower)
