"""A chat with the policy as tokens: every reply stays as it was sampled, and only new messages are rendered and tokenised."""

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from openrlhf.agents.answers import CompletionOutput, EngineRefusal
from openrlhf.data.templates import STAND_IN, Message, render, to_messages, with_parsed_arguments

HERMES = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


class ChatMistake(EngineRefusal):
    """A request that cannot be answered; the message is for the agent's author."""


class ContextFull(ChatMistake):
    """The conversation leaves no room for a reply."""


class ChatSession:
    """One conversation. Its `tokens` and `ranges` are those of an episode: see `agents.AgentExecutorBase.execute`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
        self.tokenizer, self.max_length = tokenizer, max_length
        self.tokens: list[int] = []
        self.ranges: list[tuple[int, int]] = []
        self.truncated = False
        self._asked: list[Message] = []  # the messages of the last request
        self._seen: list[Message] = []  # the messages of the last request that was answered
        self._reply: Message | None = None  # and the answer to it
        self._ended = False  # whether that answer's last token ended it

    def prompt_for(self, messages: Any, tools: Sequence[dict[str, Any]] | None = None) -> list[int]:
        """The tokens that the policy is to continue. Raises ChatMistake, ContextFull."""
        try:
            asked = to_messages(messages)
        except ValueError as error:
            raise ChatMistake(f"messages: {error}") from error
        if self._reply is None:
            prompt = self._encode(self._render(asked, tools))
        else:
            prompt = [*self.tokens, *self._new(asked, tools)]
        if len(prompt) >= self.max_length:
            self.truncated = True
            raise ContextFull(
                f"the conversation has {len(prompt)} tokens; --data.max_len {self.max_length} leaves no room"
            )
        self._asked = asked
        return prompt

    def _new(self, messages: list[Message], tools: Sequence[dict[str, Any]] | None) -> list[int]:
        """What has been said since the last reply, as tokens that follow it."""
        count = len(self._seen)
        assert self._reply is not None
        if messages[:count] != self._seen or len(messages) <= count or not _same(messages[count], self._reply):
            raise ChatMistake(
                "these messages do not continue the conversation of this session: they must begin with the messages of the last "
                "request, and the reply to it unchanged. Several conversations need several sessions"
            )
        after = self._after_reply(messages[count + 1 :], tools)
        end = str(self.tokenizer.decode(self.tokens[-1:])) if self._ended else ""
        said = after.lstrip()
        return self._encode(said.removeprefix(end) if end and said.startswith(end) else after)

    def _after_reply(self, messages: list[Message], tools: Sequence[dict[str, Any]] | None) -> str:
        """What the chat template writes after the last reply, whose own text is not looked at."""
        stand_in: Message = {"role": "assistant", "content": STAND_IN}
        before = [*self._seen, stand_in]
        try:
            text = self._render([*before, *messages], tools)
        except ChatMistake:  # some templates want to see the call before its result
            if not (self._reply and self._reply.get("tool_calls")):
                raise
            calls = with_parsed_arguments({**stand_in, "tool_calls": self._reply["tool_calls"]})
            shown = self._render([*self._seen, calls], tools, prompt=False)
            text = self._render([*self._seen, calls, *messages], tools)
            if not text.startswith(shown):
                raise
            text = self._render(before, tools, prompt=False) + text.removeprefix(shown)
        _, found, after = text.rpartition(STAND_IN)
        if not found:
            raise ChatMistake("the chat template does not show earlier replies, so the conversation cannot go on")
        return after

    def heard(self, prompt: list[int], output: CompletionOutput, *, tools: bool) -> Message:
        """Keep what was sampled, and read it as a message: calls of tools, if there are any, and text."""
        self._seen = self._asked
        self.tokens = [*prompt, *output.token_ids]
        self.ranges.append((len(prompt), len(self.tokens)))
        self.truncated = output.finish_reason == "length"
        stopped_by = output.stop_reason if isinstance(output.stop_reason, str) else None
        self._ended = output.finish_reason == "stop" and stopped_by is None
        text = str(self.tokenizer.decode(output.token_ids, skip_special_tokens=True))
        if stopped_by:
            text = text.partition(stopped_by)[0]
        message = {"role": "assistant", "content": text}
        if tools:
            message = parse_reply(self.tokenizer, text, prefix=prompt, sampled=output.token_ids)
            if stopped_by:
                message["content"] = message["content"].partition(stopped_by)[0]
        self._reply = message
        return message

    def _render(self, messages: list[Message], tools: Sequence[dict[str, Any]] | None, *, prompt: bool = True) -> str:
        try:
            return render(self.tokenizer, messages, add_generation_prompt=prompt, tools=tools)
        except ValueError as error:
            raise ChatMistake(str(error)) from error

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def parse_reply(
    tokenizer: PreTrainedTokenizerBase, text: str, *, prefix: Sequence[int] = (), sampled: Sequence[int] = ()
) -> Message:
    """A reply as a message, calls of tools taken out of its text.

    If the tokenizer has a response template, it reads the calls, from the `sampled` tokens and the `prefix` before them. If not,
    calls are `<tool_call>` blocks of JSON. A block that cannot be read stays text.
    """
    if getattr(tokenizer, "response_template", None):
        try:
            parsed: Any = tokenizer.parse_response(list(sampled), prefix=list(prefix))
        except ValueError:  # not JSON
            parsed = {"content": text}
        calls = [call.get("function", call) for call in parsed.get("tool_calls") or []]
        calls = [call for call in calls if isinstance(call, dict) and isinstance(call.get("name"), str)]
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
    return {"id": uuid.uuid4().hex[:9], "type": "function", "function": function}  # some templates want nine characters


def _same(echoed: Message, reply: Message) -> bool:
    """Whether a client's copy of our reply says the same; clients add and drop fields that are empty."""
    calls = [[call.get("id") for call in message.get("tool_calls") or []] for message in (echoed, reply)]
    texts = [str(message.get("content") or "").strip() for message in (echoed, reply)]
    return echoed["role"] == "assistant" and calls[0] == calls[1] and texts[0] == texts[1]
