"""Detects tools that a chat template omits.

If a template omits tools, the model sees neither the tool definitions nor the assistant's calls.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from openrlhf.data.messages import Message
from openrlhf.data.templates import render

CALLS = "tool_calls"  # a field of a message
ONLY_CALLS = "whose answer consists only of tool calls, which the chat template omits"


@dataclass
class LostTools:
    """The tools that a chat template omits from a conversation."""

    first: str = ""  # description of the first omitted definition or call
    turns: list[int] = field(default_factory=list)  # turns that render as empty answers


def lost_tools(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]],
) -> LostTools:
    """Find tool definitions and calls whose removal does not change the rendered text."""
    lost = LostTools()
    calling = [turn for turn, message in enumerate(messages) if message.get(CALLS)]
    if not tools and not calling:
        return lost
    text = render(tokenizer, messages, tools=tools)

    def is_same(changed: Sequence[Message], shown: Any = tools) -> bool:
        with suppress(ValueError):  # a template that rejects the change renders the tools
            return text == render(tokenizer, changed, tools=shown)
        return False

    if tools and is_same(messages, None):
        lost.first = f"the tool definition {tools[0]!r:.80}"
    for turn in calling:
        before, message, after = messages[:turn], messages[turn], messages[turn + 1 :]
        silent = {name: part for name, part in message.items() if name != CALLS}
        if is_same([*before, silent, *after]):
            lost.first = lost.first or f"the tool calls {message[CALLS]!r:.80}"
            empty = {"role": message["role"], "content": message["content"]}
            if not message["content"].strip() and is_same([*before, empty, *after]):
                lost.turns.append(turn)
    return lost
