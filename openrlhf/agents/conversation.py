"""A conversation between a chat client and the policy, stored as tokens.

Replies keep their sampled tokens. Only new messages are rendered and tokenized.
"""

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from openrlhf.agents.answers import CompletionOutput, EngineRefusal
from openrlhf.data.continuation import encode_after, encode_text
from openrlhf.data.messages import Message, to_messages, with_parsed_arguments
from openrlhf.data.templates import STAND_IN, in_common, render
from openrlhf.data.tokenizer import most_characters

TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)  # Hermes format
EXCERPT_CHARACTERS = 60  # maximum length of quoted text in a notice


class ChatMistake(EngineRefusal):
    """An error for a request that cannot be answered.

    The message is written for the agent's author. `param` names the invalid field.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextFull(ChatMistake):
    """An error for a conversation that leaves no room for a reply."""


def check_size(text: str, max_length: int) -> None:
    """Raise ContextFull if a text is too long to fit into `max_length` tokens.

    The check does not tokenize the text, because tokenizing could take a long time.
    """
    limit = most_characters(max_length)
    if len(text) > limit:
        raise ContextFull(
            f"{len(text)} characters do not fit into --data.max_len {max_length}: "
            f"the limit is {limit} characters"
        )


@dataclass(frozen=True, kw_only=True)
class TemplateInputs:
    """The parts of a request that the chat template renders."""

    messages: list[Message]
    tools: Sequence[dict[str, Any]]
    variables: Mapping[str, Any]

    def render(
        self,
        tokenizer: PreTrainedTokenizerBase,
        messages: Sequence[Message] | None = None,
        *,
        prompt: bool = True,
    ) -> str:
        """Render the request's messages, or `messages` with the same tools.

        With `prompt`, the text ends with the header of the policy's reply. Raises ChatMistake.
        """
        if messages is None:
            messages = self.messages
        try:
            return render(
                tokenizer,
                messages,
                add_generation_prompt=prompt,
                tools=self.tools,
                variables=self.variables,
            )
        except ValueError as error:
            raise ChatMistake(str(error), "messages") from error


def template_inputs(
    messages: Any,
    tools: Sequence[dict[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> TemplateInputs:
    """Return the fields of a request as one object. Raises ChatMistake for malformed messages."""
    try:
        messages = to_messages(messages)
    except ValueError as error:
        raise ChatMistake(f"messages: {error}", "messages") from error
    return TemplateInputs(messages=messages, tools=tools or [], variables=variables or {})


@dataclass(frozen=True, kw_only=True)
class _Prompt:
    """The prompt of a request."""

    inputs: TemplateInputs
    tokens: list[int]  # tokens of the entire conversation
    added: str  # the text that the request adds to the conversation


class Conversation:
    """One conversation.

    `tokens` and `ranges` are the observation tokens and action ranges that
    `contract.AgentExecutorBase.execute` returns. `notices` has a message for each kind of
    difference between the tokens and a fresh rendering of the conversation. `truncated` is true if
    a limit of the run, rather than of the request, truncated the last reply.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        *,
        max_new_tokens: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.max_new_tokens = max_new_tokens
        self.tokens: list[int] = []
        self.ranges: list[tuple[int, int]] = []
        self.truncated = False
        self.notices: dict[str, str] = {}
        self._text = ""  # the decoded text of `tokens`
        self._pending: _Prompt | None = None  # the last prompt
        self._answered: TemplateInputs | None = None  # the last request that has a reply
        self._reply: Message = {}  # the last reply
        self._reply_ended = False  # True if the reply ends with an end-of-turn token

    def mismatch(self, inputs: TemplateInputs) -> str | None:
        """Return why a request does not continue this conversation, or None if it does."""
        before = self._answered
        if before is None:
            return None
        count = len(before.messages)
        first_difference = in_common(inputs.messages, before.messages)
        if first_difference < count:
            return f"message {first_difference} differs from the previous request"
        reply = _content_of(self._reply)
        if len(inputs.messages) <= count or _content_of(inputs.messages[count]) != reply:
            return f"message {count} is not the unchanged reply to the previous request"
        if self._renders_differently(inputs, before):
            return "its tools or chat_template_kwargs change text that the policy has already read"
        return None

    def _renders_differently(self, inputs: TemplateInputs, before: TemplateInputs) -> bool:
        """Return whether a request renders the existing conversation differently."""
        if (inputs.tools, inputs.variables) == (before.tools, before.variables):
            return False
        seen = [*before.messages, with_parsed_arguments(self._reply)]
        try:
            text = inputs.render(self.tokenizer, seen, prompt=False)
            return text != before.render(self.tokenizer, seen, prompt=False)
        except ChatMistake:  # the template rejects one of the requests
            return True

    def prompt_for(self, inputs: TemplateInputs) -> list[int]:
        """Return the prompt tokens of a request for which `mismatch` returns None.

        Raises ChatMistake or ContextFull.
        """
        whole = inputs.render(self.tokenizer)
        check_size(whole, self.max_length)
        if self._answered is None:
            added = whole
            tokens = encode_text(self.tokenizer, whole)
        else:
            added = self._added(inputs, self._answered)
            continuation = encode_after(self.tokenizer, self.tokens, added)
            self._note_differences(whole, added, exact=continuation.exact)
            tokens = [*self.tokens, *continuation.tokens]
        if len(tokens) >= self.max_length:
            raise ContextFull(
                f"the conversation has {len(tokens)} tokens; "
                f"--data.max_len {self.max_length} leaves no room for a reply"
            )
        self._pending = _Prompt(inputs=inputs, tokens=tokens, added=added)
        return tokens

    def _added(self, inputs: TemplateInputs, before: TemplateInputs) -> str:
        """Return the text after the last reply, without the end token that was already sampled."""
        after = self._after_reply(inputs, before)
        if not self._reply_ended:
            return after
        end = str(self.tokenizer.decode(self.tokens[-1:]))
        following = after.lstrip()
        if end and following.startswith(end):
            return following.removeprefix(end)
        return after

    def _after_reply(self, inputs: TemplateInputs, before: TemplateInputs) -> str:
        """Return the text that the chat template renders after the last reply.

        The text of the reply itself is ignored.
        """
        new = inputs.messages[len(before.messages) + 1 :]
        stand_in: Message = {"role": "assistant", "content": STAND_IN}
        seen = [*before.messages, stand_in]
        try:
            text = inputs.render(self.tokenizer, [*seen, *new])
        except ChatMistake:  # some templates require a tool call before its result
            if not self._reply.get("tool_calls"):
                raise
            calls = with_parsed_arguments({**stand_in, "tool_calls": self._reply["tool_calls"]})
            with_calls = [*before.messages, calls]
            shown = inputs.render(self.tokenizer, with_calls, prompt=False)
            text = inputs.render(self.tokenizer, [*with_calls, *new])
            if not text.startswith(shown):
                raise
            without_calls = inputs.render(self.tokenizer, seen, prompt=False)
            text = without_calls + text.removeprefix(shown)
        _, found, after = text.rpartition(STAND_IN)
        if not found:
            raise ChatMistake(
                "the chat template does not render earlier replies, "
                "so the conversation cannot continue"
            )
        return after

    def _note_differences(self, whole: str, added: str, *, exact: bool) -> None:
        """Add notices if the conversation differs from `whole`, a fresh rendering of it.

        `added` is the text after the last reply. `exact` is true if the added tokens start where
        the reply ends.
        """
        ours = self._text + added
        if ours != whole:
            kind = "template"
            if "".join(ours.split()) == "".join(whole.split()):
                kind = "spaces"  # kept separate, because each kind of notice is logged only once
            self.notices[kind] = _difference(ours, whole)
        if not exact:
            self.notices["border"] = (
                f"the tokenizer would merge the text after a reply {added[:EXCERPT_CHARACTERS]!r} "
                "with the end of the reply. The reply keeps its sampled tokens"
            )

    def add_reply(self, output: CompletionOutput, *, tools: bool) -> Message:
        """Append the sample that continues the last prompt, and return it as a message.

        With `tools`, tool calls are parsed from the sample's text.
        """
        prompt = self._pending
        assert prompt is not None
        start = len(prompt.tokens)
        self._answered = prompt.inputs
        self.tokens = [*prompt.tokens, *output.token_ids]
        self.ranges.append((start, len(self.tokens)))
        self.truncated = output.is_cut(start, self.max_length, self.max_new_tokens)
        self._text += prompt.added + str(self.tokenizer.decode(output.token_ids))
        text = str(self.tokenizer.decode(output.token_ids, skip_special_tokens=True))
        stop = output.stop_reason
        self._reply_ended = output.finish_reason == "stop" and not isinstance(stop, str)
        self._reply = {"role": "assistant", "content": text}
        if tools:
            self._reply = parse_reply(
                self.tokenizer, text, prefix=prompt.tokens, sampled=output.token_ids
            )
        if isinstance(stop, str):
            self._reply["content"] = self._reply["content"].partition(stop)[0]
        return self._reply


def _difference(ours: str, whole: str) -> str:
    """Describe the first difference between a conversation and a fresh rendering of it."""
    place = in_common(ours, whole)
    common = ours[max(0, place - EXCERPT_CHARACTERS) : place]
    end = place + EXCERPT_CHARACTERS
    return (
        "the chat template renders earlier turns differently once later turns are added (it may "
        "drop reasoning, trim spaces, or lack the stop string that ended a reply): after "
        f"{common!r} the policy has read {ours[place:end]!r}, but the new rendering has "
        f"{whole[place:end]!r}. The policy continues from the text that it has already read"
    )


def parse_reply(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    *,
    prefix: Sequence[int] = (),
    sampled: Sequence[int] = (),
) -> Message:
    """Return a reply as a message, with tool calls extracted from its text.

    If the tokenizer has a response template, the template parses the `sampled` tokens that follow
    `prefix`. Otherwise tool calls are `<tool_call>` blocks with JSON; a block that cannot be parsed
    remains text.
    """
    calls: list[dict[str, Any]] = []
    if getattr(tokenizer, "response_template", None):
        parsed: Any = {"content": text}
        with suppress(ValueError):  # not JSON
            parsed = tokenizer.parse_response(list(sampled), prefix=list(prefix))
        content = parsed.get("content") or ""
        for call in parsed.get("tool_calls") or []:
            function = call.get("function", call)
            if _is_function(function):
                calls.append(function)
    else:
        content = text
        for block in TOOL_CALL.finditer(text):
            with suppress(ValueError):
                function = json.loads(block[1])
                if _is_function(function):
                    calls.append(function)
                    content = content.replace(block[0], "", 1)
        if calls:
            content = content.strip()
    message: Message = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [_as_call(function) for function in calls]
    return message


def _is_function(parsed: Any) -> bool:
    return isinstance(parsed, dict) and isinstance(parsed.get("name"), str)


def _as_call(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return a function's name and arguments as a tool call in the API's format."""
    arguments = function.get("arguments", {})
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments)
    return {
        "id": uuid.uuid4().hex[:9],  # some templates require nine characters
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _content_of(message: Message) -> dict[str, Any]:
    """Return a message's role, text and tool calls. Clients may add or drop empty fields."""
    calls: list[dict[str, Any]] = []
    for call in with_parsed_arguments(message).get("tool_calls") or []:
        function = call.get("function") or call
        name = function.get("name")
        calls.append({"id": call.get("id"), "name": name, "arguments": function.get("arguments")})
    text = str(message.get("content") or "").strip()
    return {"role": message["role"], "text": text, "calls": calls}
