"""A single-turn agent.

The samples of one prompt finish immediately. All other samples wait until the scoring of the
finished prompt has started.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

FIRST, SPANS = (Path(__file__).with_name(name) for name in ("first.txt", "spans.jsonl"))


class Patient(AgentInstanceBase):
    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        prompt = states["observation_text"]
        try:
            with FIRST.open("x") as file:
                file.write(prompt)
        except FileExistsError:
            while FIRST.read_text() != prompt and not SPANS.exists():
                await asyncio.sleep(0.01)
        return {"rewards": 0.0, "environment_feedback": "", "done": True}


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self) -> None:
        super().__init__(Patient)
