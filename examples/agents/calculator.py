"""An agent with a calculator tool that uses only the stock `openai` client.

    --train.agent_func_path examples/agents/calculator.py --data.label_key answer

The policy may call the calculator before it answers. The reward is 1 if the last message is the
correct answer, else 0. Requires `pip install openai`.
"""

from __future__ import annotations

import json
import operator
import re
from typing import Any

from openai import AsyncOpenAI, BadRequestError

from openrlhf.utils.agent import OpenAIAgentExecutor

TURNS = 4
SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
EXPRESSION = {
    "type": "object",
    "properties": {"expression": {"type": "string"}},
    "required": ["expression"],
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "calculator", "description": "Two numbers.", "parameters": EXPRESSION},
    }
]


def calculate(arguments: str) -> str:
    """Evaluate the tool's arguments: `{"expression": "7*8"}` gives 56."""
    try:
        found = re.fullmatch(r"(\d+)([-+*])(\d+)", json.loads(arguments)["expression"])
        left, sign, right = found.groups() if found else ("", "", "")
        return str(SIGNS[sign](int(left), int(right)))
    except (ValueError, LookupError, TypeError):
        return "error"


class AgentExecutor(OpenAIAgentExecutor):
    """The class that --train.agent_func_path requires."""

    def __init__(self) -> None:
        super().__init__()
        self.client = AsyncOpenAI(base_url="http://127.0.0.1", api_key="none")

    async def run_agent(self, prompt: str, label: Any, session_id: str) -> dict[str, Any]:
        """Run a conversation: the question, calculator calls and the answer."""
        client = self.client.with_options(base_url=self.session_url(session_id))
        messages: list[Any] = [{"role": "user", "content": prompt}]
        said, calls = "", 0
        try:
            for _ in range(TURNS):
                answer = await client.chat.completions.create(
                    model="policy", messages=messages, tools=TOOLS
                )
                message = answer.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                said = message.content or ""
                if not message.tool_calls:
                    break
                for call in message.tool_calls:
                    result = (
                        calculate(call.function.arguments) if call.type == "function" else "error"
                    )
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
                    calls += 1
        except BadRequestError as error:
            if error.code != "context_length_exceeded":
                raise
        return {"reward": float(said.strip() == str(label)), "extra_logs": {"tool_calls": calls}}
