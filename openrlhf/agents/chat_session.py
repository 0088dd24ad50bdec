"""A chat with the policy as tokens: every reply stays as it was sampled, and only new messages are
rendered and tokenised.
"""

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from openrlhf.agents.answers import CompletionOutput, EngineRefusal
from openrlhf.agents.continuation import encode, encode_after
from openrlhf.data.messages import Message, to_messages, with_parsed_arguments
from openrlhf.data.templates import STAND_IN, Span, in_common, render
from openrlhf.data.tokenizer import most_characters

HERMES = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
SHOWN = 60  # characters of a text in a notice
CONTEXT = 200  # characters before a reply that are encoded with it


class ChatMistake(EngineRefusal):
    """A request that cannot be answered. The message is for the agent's author; `param` names the
    field at fault.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextFull(ChatMistake):
    """The conversation leaves no room for a reply."""


def check_size(text: str, max_length: int) -> None:
    """Raise ContextFull for a text that cannot fit into `max_length` tokens and would take long to
    tokenise.
    """
    limit = most_characters(max_length)
    if len(text) > limit:
        raise ContextFull(
            f"{len(text)} characters do not fit into --data.max_len {max_length}: the limit is {limit} characters"
        )


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The parts of a request that the chat template renders: messages, tool definitions and further
    variables.
    """

    messages: list[Message]
    tools: Sequence[dict[str, Any]]
    variables: Mapping[str, Any]

    def rendered(
        self,
        tokenizer: PreTrainedTokenizerBase,
        messages: Sequence[Message] | None = None,
        *,
        prompt: bool = True,
    ) -> str:
        """Return the text of the messages, or of other `messages` with the same tools. Raises
        ChatMistake.
        """
        shown = self.messages if messages is None else messages
        try:
            return render(
                tokenizer,
                shown,
                add_generation_prompt=prompt,
                tools=self.tools,
                variables=self.variables,
            )
        except ValueError as error:
            raise ChatMistake(str(error), "messages") from error


def asked_for(
    messages: Any,
    tools: Sequence[dict[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> Asked:
    """Return the fields of a request in one object. Raises ChatMistake for malformed messages."""
    try:
        return Asked(messages=to_messages(messages), tools=tools or (), variables=variables or {})
    except ValueError as error:
        raise ChatMistake(f"messages: {error}", "messages") from error


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """The prompt of a request: all its tokens, and the text that the request adds to the
    conversation.
    """

    asked: Asked
    tokens: list[int]
    added: str


class ChatSession:
    """One conversation. Its `tokens` and `ranges` are those of an episode: see
    `agents.AgentExecutorBase.execute`.

    `notices` has a sentence for each kind of difference between these tokens and a fresh rendering
    of the conversation.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        *,
        max_new_tokens: int | None = None,
    ) -> None:
        self.tokenizer, self.max_length, self.max_new_tokens = tokenizer, max_length, max_new_tokens
        self.tokens: list[int] = []
        self.ranges: list[tuple[int, int]] = []
        self.truncated = False  # by a limit of the run, not of a request
        self.notices: dict[str, str] = {}
        self._texts: list[str] = []  # the text before each reply, as the template wrote it
        self._replies: list[str] = []  # the texts of the replies
        self._read = ""  # the whole conversation as the policy has it
        self._pending: Prompt | None = None  # of the last request
        self._answered: Asked | None = None  # the last request that was answered
        self._reply: Message = {}  # the answer to it
        self._ended = False  # whether the last token of that answer ended it

    def prompt_for(self, asked: Asked) -> list[int]:
        """Return the tokens that the policy is to continue. Raises ChatMistake, ContextFull."""
        try:
            self._pending = self._prompt(asked)
        except ContextFull:
            self.truncated = True
            raise
        return self._pending.tokens

    def _prompt(self, asked: Asked) -> Prompt:
        if reason := self.parting(asked):
            raise ChatMistake(
                f"the request does not continue the conversation: {reason}", "messages"
            )
        whole = asked.rendered(self.tokenizer)
        check_size(whole, self.max_length)
        if self._answered is None:
            prompt = Prompt(asked=asked, tokens=encode(self.tokenizer, whole), added=whole)
        else:
            added = self._added(asked, self._answered)
            new = encode_after(self.tokenizer, self.tokens, added).tokens
            self._compare(whole, added, new)
            prompt = Prompt(asked=asked, tokens=[*self.tokens, *new], added=added)
        if len(prompt.tokens) >= self.max_length:
            raise ContextFull(
                f"the conversation has {len(prompt.tokens)} tokens; --data.max_len {self.max_length} leaves no room"
            )
        return prompt

    def parting(self, asked: Asked) -> str | None:
        """Return why a request does not continue this conversation, or None if it does."""
        before = self._answered
        if before is None:
            return None
        count = len(before.messages)
        place = in_common(asked.messages, before.messages)
        if place < count:
            return f"its message {place} differs from the last request"
        if len(asked.messages) <= count or not _same(asked.messages[count], self._reply):
            return f"its message {count} is not the unchanged reply to the last request"
        changed: list[str] = []
        if list(asked.tools) != list(before.tools):
            changed.append("tools")
        if asked.variables != before.variables:
            changed.append("chat_template_kwargs")
        seen = [*before.messages, with_parsed_arguments(self._reply)]
        if changed and self._renders_otherwise(seen, asked, before):
            return f"its {' and '.join(changed)} change text that the policy has read"
        return None

    def _renders_otherwise(self, seen: list[Message], asked: Asked, before: Asked) -> bool:
        try:
            now, then = (
                each.rendered(self.tokenizer, seen, prompt=False) for each in (asked, before)
            )
        except ChatMistake:  # the template refuses one of them
            return True
        return now != then

    def _added(self, asked: Asked, before: Asked) -> str:
        """Return the text that follows the last reply, without the end of turn that the policy has
        sampled.
        """
        after = self._after_reply(asked, before)
        end = str(self.tokenizer.decode(self.tokens[-1:])) if self._ended else ""
        said = after.lstrip()
        if end and said.startswith(end):
            return said.removeprefix(end)
        return after

    def _after_reply(self, asked: Asked, before: Asked) -> str:
        """Return what the chat template writes after the last reply. The text of the reply itself
        is ignored.
        """
        new = asked.messages[len(before.messages) + 1 :]
        stand_in: Message = {"role": "assistant", "content": STAND_IN}
        seen = [*before.messages, stand_in]
        try:
            text = asked.rendered(self.tokenizer, [*seen, *new])
        except ChatMistake:  # some templates want to see the call before its result
            if not self._reply.get("tool_calls"):
                raise
            calls = with_parsed_arguments({**stand_in, "tool_calls": self._reply["tool_calls"]})
            shown = asked.rendered(self.tokenizer, [*before.messages, calls], prompt=False)
            text = asked.rendered(self.tokenizer, [*before.messages, calls, *new])
            if not text.startswith(shown):
                raise
            text = asked.rendered(self.tokenizer, seen, prompt=False) + text.removeprefix(shown)
        _, found, after = text.rpartition(STAND_IN)
        if not found:
            raise ChatMistake(
                "the chat template does not render earlier replies, so the conversation cannot continue"
            )
        return after

    def _compare(self, whole: str, added: str, new: list[int]) -> None:
        """Record where the tokens differ from a fresh rendering of the conversation, apart from
        sampled replies.
        """
        spans = _spans_between(whole, [*self._texts, added], self._replies)
        if spans is None:
            if "template" not in self.notices:
                self.notices["template"] = _parting(self._read + added, whole)
            return
        for reply, (start, end) in zip(self._replies, spans, strict=True):
            if reply not in whole[start:end]:
                self.notices["reply"] = (
                    "the chat template renders earlier replies differently from what was sampled (it may drop "
                    f"reasoning): it has {whole[start:end][:SHOWN]!r} for {reply[:SHOWN]!r}. The policy keeps its own"
                )
        start, _ = spans[-1]
        expected = (
            encode(self.tokenizer, whole[max(0, start - CONTEXT) :])[-len(new) :] if new else []
        )
        if new != expected:
            place = in_common(new, expected)
            ours, theirs = (
                self.tokenizer.convert_ids_to_tokens(ids[place : place + 8])
                for ids in (new, expected)
            )
            self.notices["border"] = (
                f"the text after a reply is tokenised as {ours}, but as {theirs} in the whole conversation, because "
                "the tokenizer merges it with the end of the reply. The sampled tokens of the reply are kept"
            )

    def heard(self, prompt: list[int], output: CompletionOutput, *, tools: bool) -> Message:
        """Keep what was sampled, and read it as a message: calls of tools, if there are any, and
        text.
        """
        assert self._pending is not None
        self._answered = self._pending.asked
        self._texts.append(self._pending.added)
        self.tokens = [*prompt, *output.token_ids]
        self.ranges.append((len(prompt), len(self.tokens)))
        self.truncated = output.is_cut(len(prompt), self.max_length, self.max_new_tokens)
        stopped_by = output.stop_reason if isinstance(output.stop_reason, str) else None
        self._ended = output.finish_reason == "stop" and stopped_by is None
        self._read += self._pending.added + str(self.tokenizer.decode(output.token_ids))
        text = str(self.tokenizer.decode(output.token_ids, skip_special_tokens=True))
        if stopped_by:
            text = text.partition(stopped_by)[0]
        self._replies.append(text.strip())
        message = {"role": "assistant", "content": text}
        if tools:
            message = parse_reply(self.tokenizer, text, prefix=prompt, sampled=output.token_ids)
            if stopped_by:
                message["content"] = message["content"].partition(stopped_by)[0]
        self._reply = message
        return message


def _parting(ours: str, whole: str) -> str:
    """Return a sentence about the first place where a conversation differs from its whole
    rendering.
    """
    place = in_common(ours, whole)
    return (
        "the chat template renders earlier turns differently once later turns follow: after "
        f"{ours[max(0, place - SHOWN) : place]!r} the policy has {ours[place : place + SHOWN]!r}, and the whole "
        f"conversation {whole[place : place + SHOWN]!r}. The policy continues from what it has read"
    )


def _spans_between(whole: str, texts: Sequence[str], replies: Sequence[str]) -> list[Span] | None:
    """Return the spans of `whole` between `texts`, in which the `replies` are expected.

    None if `whole` does not begin with the first text, end with the last, and have the others in
    between.
    """
    if not whole.startswith(texts[0]):
        return None
    spans: list[Span] = []
    start = len(texts[0])
    for text, reply in zip(texts[1:-1], replies[:-1], strict=True):
        said = whole.find(reply, start, start + len(reply) + SHOWN)
        end = whole.find(text, start if said < 0 else said + len(reply))
        if end < 0:
            return None
        spans.append((start, end))
        start = end + len(text)
    last = len(whole) - len(texts[-1])
    if last < start or not whole.endswith(texts[-1]):
        return None
    return [*spans, (start, last)]


def parse_reply(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    *,
    prefix: Sequence[int] = (),
    sampled: Sequence[int] = (),
) -> Message:
    """A reply as a message, calls of tools taken out of its text.

    If the tokenizer has a response template, it reads the calls, from the `sampled` tokens and the
    `prefix` before them. If not, calls are `<tool_call>` blocks of JSON. A block that cannot be
    read stays text.
    """
    if getattr(tokenizer, "response_template", None):
        try:
            parsed: Any = tokenizer.parse_response(list(sampled), prefix=list(prefix))
        except ValueError:  # not JSON
            parsed = {"content": text}
        calls = [call.get("function", call) for call in parsed.get("tool_calls") or []]
        calls = [
            call for call in calls if isinstance(call, dict) and isinstance(call.get("name"), str)
        ]
        content = parsed.get("content") or ""
    else:
        found = [(block.group(0), _call_in(block.group(1))) for block in HERMES.finditer(text)]
        calls = [call for _, call in found if call]
        content = text
        for block, call in found:
            content = content.replace(block, "", 1) if call else content
        content = content.strip() if calls else content
    message: Message = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [_as_call(call) for call in calls]
    return message


def _call_in(text: str) -> dict[str, Any] | None:
    try:
        call = json.loads(text)
    except ValueError:
        return None
    return call if isinstance(call, dict) and isinstance(call.get("name"), str) else None


def _as_call(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = call.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    function = {"name": call["name"], "arguments": text}
    return {
        "id": uuid.uuid4().hex[:9],
        "type": "function",
        "function": function,
    }  # some templates want nine characters


def _same(echoed: Message, reply: Message) -> bool:
    """Return whether a client's copy of our reply has the same content; clients add and drop empty
    fields.
    """
    copies = [with_parsed_arguments(message) for message in (echoed, reply)]
    calls = [[_said_in(call) for call in message.get("tool_calls") or []] for message in copies]
    texts = [str(message.get("content") or "").strip() for message in copies]
    return echoed["role"] == "assistant" and calls[0] == calls[1] and texts[0] == texts[1]


def _said_in(call: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    function = call.get("function") or call
    return call.get("id"), function.get("name"), function.get("arguments")
