"""Tools that a chat template leaves out: the model sees neither their definitions nor the calls of
the assistant.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from transformers import PreTrainedTokenizerBase

from openrlhf.data.findings import Finding, Level
from openrlhf.data.templates import Message, render

CHECK = "tools in the chat template"
CALLS = "tool_calls"  # a field of a message
ONLY_CALLS = "whose answer is nothing but tool calls, which the chat template leaves out"


def lost_tool(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    text: str,
    *,
    tools: Sequence[dict[str, Any]],
    add_generation_prompt: bool = False,
) -> str:
    """Return which definition or call is missing in a text that the chat template made of messages;
    empty if none is.

    A name may be in the text by accident, in a question for instance, so the text must also change
    without the tools.
    """
    calls = [call for message in messages for call in message.get(CALLS) or []]
    spoken: list[Message] = []
    for message in messages:
        spoken.append({field: value for field, value in message.items() if field != CALLS})
    for kind, given, other, shown in (
        ("definition", tools, messages, None),
        ("call", calls, spoken, tools),
    ):
        names = [_name(each) for each in given]
        missing = next((name for name in names if name not in text), None)
        if missing is None and names:
            with suppress(
                ValueError
            ):  # the template may refuse the result of a tool that nobody called
                if text == render(
                    tokenizer, other, tools=shown, add_generation_prompt=add_generation_prompt
                ):
                    missing = names[0]
        if missing is not None:
            return f"the {kind} of {missing!r}"
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
    """Return the turns that consist of tool calls and look like an empty answer, because the
    template leaves calls out.
    """
    suspects = [
        turn
        for turn in turns
        if messages[turn].get(CALLS) and not messages[turn]["content"].strip()
    ]
    if not suspects:
        return []
    text = render(tokenizer, messages, tools=tools)
    found: list[int] = []
    for turn in suspects:
        empty = {field: messages[turn][field] for field in ("role", "content")}
        with suppress(ValueError):  # a template that refuses an empty answer shows calls
            if text == render(
                tokenizer, [*messages[:turn], empty, *messages[turn + 1 :]], tools=tools
            ):
                found.append(turn)
    return found


def check_tools(lost: Sequence[str], *, empty: int, what: str, first: str, model: str) -> Finding:
    """Return a warning if the chat template leaves out tools: `lost` has the first of each row.

    `empty` counts turns that are no targets, because nothing of them is rendered. `first` names the
    first such row.
    """
    count = sum(map(bool, lost))
    if not count:
        return Finding(
            check=CHECK,
            level=Level.PASS,
            seen="The chat template renders all tools and their calls.",
        )
    seen = (
        f"{count} of {len(lost)} {what}s have tools or tool calls that the chat template of {model} leaves out, so the model "
        f"does not see them. The first: {first} lacks {next(filter(None, lost))}."
    )
    if empty:
        seen += f" {empty} assistant turns are not trained on, because they would be empty answers."
    return Finding(
        check=CHECK,
        level=Level.WARNING,
        seen=seen,
        fix="Use a template that renders tools and tool_calls: with --data.tokenizer_chat_template in offline training, "
        "otherwise in chat_template.jinja in the model's folder. Or write the calls into the contents of the messages.",
    )
