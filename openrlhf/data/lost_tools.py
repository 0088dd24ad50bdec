"""Detection of tools that a chat template omits.

The model then sees neither the tool definitions nor the assistant's calls.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from transformers import PreTrainedTokenizerBase

from openrlhf.checks import Finding
from openrlhf.data.messages import Message
from openrlhf.data.templates import render

CALLS = "tool_calls"  # a field of a message
ONLY_CALLS = "whose answer consists only of tool calls, which the chat template omits"


def lost_tool(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    text: str,
    *,
    tools: Sequence[dict[str, Any]],
    add_generation_prompt: bool = False,
) -> str:
    """Return the first tool definition or call that is missing from the rendered messages.

    Returns "" if none is missing. Finding a tool's name in the text is not enough, because it may
    occur in a question: rendering without the tools must also give a different text.
    """

    def first_missing(
        named: Sequence[Mapping[str, Any]], without: Sequence[Message], shown: Any
    ) -> str | None:
        names = list(map(_name, named))
        for name in names:
            if name not in text:
                return name
        if names:
            with suppress(ValueError):  # a template may reject a tool result without its call
                bare = render(
                    tokenizer, without, tools=shown, add_generation_prompt=add_generation_prompt
                )
                if text == bare:
                    return names[0]
        return None

    missing = first_missing(tools, messages, None)
    if missing is not None:
        return f"the definition of {missing!r}"
    calls: list[Mapping[str, Any]] = []
    without_calls: list[Message] = []
    for message in messages:
        calls += message.get(CALLS) or []
        without_calls.append({field: part for field, part in message.items() if field != CALLS})
    missing = first_missing(calls, without_calls, tools)
    if missing is not None:
        return f"the call of {missing!r}"
    return ""


def _name(tool: Mapping[str, Any]) -> str:
    function = tool.get("function")
    described = function if isinstance(function, dict) else tool
    return str(described.get("name") or "")


def empty_calls(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    turns: Sequence[int],
    *,
    tools: Sequence[dict[str, Any]],
) -> list[int]:
    """Return the turns that render as empty answers because the template omits their calls."""
    suspects: list[int] = []
    for turn in turns:
        if messages[turn].get(CALLS) and not messages[turn]["content"].strip():
            suspects.append(turn)
    if not suspects:
        return []
    text = render(tokenizer, messages, tools=tools)
    found: list[int] = []
    for turn in suspects:
        empty = {"role": messages[turn]["role"], "content": messages[turn]["content"]}
        without_calls = [*messages[:turn], empty, *messages[turn + 1 :]]
        with suppress(ValueError):  # a template that rejects an empty answer renders the calls
            if text == render(tokenizer, without_calls, tools=tools):
                found.append(turn)
    return found


def check_tools(
    lost: Sequence[str | None], *, empty: int, what: str, first: str, model: str
) -> list[Finding]:
    """Return a notice that counts the rows with tools that the chat template omits.

    `lost` contains the first missing tool of each row, if any. `first` names the first row that has
    one. `empty` counts the turns that are not targets because they render as empty answers.
    """
    count = sum(map(bool, lost))
    seen = (
        f"{count} of {len(lost)} {what}s have tools or tool calls that the chat template of "
        f"{model} omits, so the model does not see them. The first is {first} which lacks "
        f"{next(filter(None, lost))}."
    )
    if empty:
        seen += f" {empty} assistant turns are not trained on because they would be empty answers."
    fix = (
        "Use a template that renders tools and tool_calls: --data.tokenizer_chat_template in "
        "offline training, otherwise chat_template.jinja in the model's folder. Or write the calls "
        "into the message contents."
    )
    return [Finding(seen, fix)]
