"""Chat messages in dataset rows: their formats, tools, and the turns to train on."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from openrlhf.data.errors import kind, row_error

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
# Speaker names in ShareGPT and HH-RLHF data.
SPEAKERS = {
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "Human": "user",
    "Assistant": "assistant",
}
# A turn of an HH-RLHF transcript, which must begin with a header.
TRANSCRIPT = re.compile(r"\n\n(Human|Assistant):(.*?)(?=\n\n(?:Human|Assistant):|\Z)", re.DOTALL)
# message fields that include a turn in training or exclude it from training
LEARNED = ("loss", "weight")
TOOLS = "tools"  # column with the tool definitions


class Turn(NamedTuple):
    """A turn of an HH-RLHF transcript as a message, with its position in characters."""

    message: Message
    header: int  # index where the turn's header starts
    start: int  # index of the first character after the header
    end: int


def transcript_turns(text: str) -> list[Turn]:
    """Return the turns of an HH-RLHF transcript, or an empty list for any other text."""
    turns: list[Turn] = []
    if TRANSCRIPT.match(text):
        for found in TRANSCRIPT.finditer(text):
            message = {"role": SPEAKERS[found[1]], "content": found[2]}
            turns.append(Turn(message, found.start(), found.start(2), found.end()))
    return turns


def messages_of(row: Mapping[str, Any], column: str, *, role: str, flag: str) -> list[Message]:
    """Return a column's value as chat messages.

    Raises a DataError that names the row, the column and its flag.
    """
    try:
        return to_messages(row[column], role=role)
    except ValueError as error:
        raise row_error(row, column, f"{error}. {flag} names this column.") from error


def to_messages(value: Any, *, role: str = "user") -> list[Message]:
    """Return a value as chat messages.

    A string becomes one message of `role`, unless it is an HH-RLHF transcript. Messages may have
    `from` and `value`, as in ShareGPT; a single message may be given without a list; the content of
    a message may be a list of text parts. Null message fields are removed; nulls inside tool calls
    are kept. Raises a ValueError that names the malformed message and the problem.
    """
    if isinstance(value, str):
        messages: list[Message] = []
        for turn in transcript_turns(value):
            spoken = turn.message
            messages.append({**spoken, "content": spoken["content"].strip()})
        return messages or [{"role": role, "content": value}]
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list) or not value:
        seen = "an empty list" if value == [] else kind(value)
        raise ValueError(f"is {seen}, not a string or a list of chat messages")
    return [_to_message(message, number) for number, message in enumerate(value)]


def _to_message(message: Any, number: int) -> Message:
    """Return a message in standard form, with role and content.

    Raises ValueError if the message is malformed.
    """
    if not isinstance(message, dict):
        raise ValueError(
            f"message {number} is {kind(message)}, not an object with role and content"
        )
    present = {field: part for field, part in message.items() if part is not None}
    if "role" not in present and {"from", "value"} <= present.keys():
        said = _from_sharegpt(present.pop("from"), present.pop("value"), number)
        present = {**said, **present}
    if "role" not in present or not ("content" in present or present.get("tool_calls")):
        has = ", ".join(map(repr, present)) or "nothing"
        raise ValueError(f"message {number} needs 'role' and 'content', but has {has}")
    role = present["role"]
    present["content"] = _text_of_content(present.get("content", ""), number)
    if role not in ROLES:
        raise ValueError(f"the role of message {number} is {role!r}, not one of {', '.join(ROLES)}")
    calls = present.get("tool_calls") or []
    if not _are_objects(calls) or not _are_objects([call.get("function") or {} for call in calls]):
        raise ValueError(
            f"the tool_calls of message {number} must be a list of objects, not {calls!r}"
        )
    return with_parsed_arguments(present)


def _from_sharegpt(speaker: Any, value: Any, number: int) -> Message:
    """Convert ShareGPT's `from` and `value` fields to a message."""
    role = SPEAKERS.get(str(speaker), speaker)
    if speaker != "function_call":
        return {"role": role, "content": value}
    try:
        function = json.loads(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the function_call of message {number} is not JSON: {value!r}") from error
    return {"role": role, "tool_calls": [{"type": "function", "function": function}]}


def _text_of_content(content: Any, number: int) -> str:
    """Return a message's content, which may be a string or a list of text parts, as text."""
    if _are_objects(content):
        other = {part.get("type") or "text" for part in content} - {"text"}
        if other:
            held = ", ".join(sorted(map(repr, other)))
            raise ValueError(
                f"the content of message {number} has parts of type {held}; "
                "the policy reads text only"
            )
        content = "".join(str(part.get("text") or "") for part in content)
    if not isinstance(content, str):
        raise ValueError(
            f"the content of message {number} must be a string or a list of texts, "
            f"not {kind(content)}"
        )
    return content


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(part, dict) for part in value)


def with_parsed_arguments(message: Message) -> Message:
    """Return the message with tool call arguments parsed into objects, as chat templates expect."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        # Some datasets have `name` and `arguments` at the top level of a call.
        function = {**(call.get("function") or call)}
        with suppress(TypeError, ValueError):
            function["arguments"] = json.loads(function.get("arguments") or "{}")
        if call.get("function"):
            calls.append({**call, "function": function})
        else:
            calls.append(function)
    return {**message, "tool_calls": calls}


def tools_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tool definitions in the `tools` column, which contains a list or JSON text.

    Raises DataError for any other value.
    """
    written: Any = row.get(TOOLS) or []
    tools: Any = written
    if isinstance(written, str):
        with suppress(ValueError):
            tools = json.loads(written)
    if not _are_objects(tools):
        raise row_error(
            row, TOOLS, f"is {kind(tools)}, not a list of tool definitions or its JSON."
        )
    return tools


def learned_turns(messages: Sequence[Message], *, chosen: bool) -> list[int]:
    """Return the indices of the assistant turns to train on.

    With `chosen`, turns whose `loss` or `weight` field is false or 0 are excluded. Raises
    ValueError if one of these fields is present without `chosen`, has an invalid value, or includes
    a turn of another role.
    """
    turns: list[int] = []
    for number, message in enumerate(messages):
        is_assistant = message["role"] == "assistant"
        learned: Any = is_assistant
        mark = next(filter(message.__contains__, LEARNED), None)
        if mark:
            learned = message[mark]
            if not chosen or learned not in (0, is_assistant):
                raise ValueError(
                    f"message {number} ({message['role']}) has {mark} {learned!r}: the value must "
                    "be false or 0 (for assistant turns, also true or 1), and --data.multiturn is "
                    "required"
                )
        if learned:
            turns.append(number)
    return turns


def texts_in(value: Any) -> list[str]:
    """Return the strings in a value: the value itself, or the contents of its chat messages."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return texts_in(value.get("content") or value.get("value") or value.get("text"))
    texts: list[str] = []
    if isinstance(value, list):
        for part in value:
            if isinstance(part, dict):
                texts += texts_in(part)
    return texts
