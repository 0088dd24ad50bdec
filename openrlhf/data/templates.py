"""From chat messages to text, to the characters that the assistant wrote, and to their tokens."""

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any, Self

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from openrlhf.data.clock import clock_of
from openrlhf.data.errors import kind, row_error
from openrlhf.data.tokenizer import added_tokens

Message = dict[str, Any]
Span = tuple[int, int]  # [start, end) in characters
Draw = Callable[
    ..., tuple[str, list[Span]]
]  # messages to a text, and the spans that the template marks

ANSWER = "(the answer)"
STAND_IN = "<<what the assistant said>>"
REASONING = ("reasoning_content", "reasoning", "thinking")  # fields besides the content
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
# Words of ShareGPT and HH-RLHF.
SPEAKERS = {
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
}
SPEAKERS |= {"Human": "user", "Assistant": "assistant"}
TRANSCRIPT = re.compile(
    r"\n\n(Human|Assistant):"
)  # turns of a text of HH-RLHF, which begins with the first
LEARNED = ("loss", "weight")  # fields of a message
TOOLS = "tools"  # a column


def fill_template(template: str | None, text: str) -> str:
    """`template` with `text` in place of its `{}`. Other braces, in template or text, stay
    unchanged.
    """
    if template is None:
        return text
    try:
        return template.format(text)
    except (ValueError, LookupError, AttributeError):  # a template like '{"question": "{}"}'
        return template.replace("{}", text, 1)


def messages_of(row: Mapping[str, Any], column: str, *, role: str, flag: str) -> list[Message]:
    """The value of a column as chat messages. Raises DataError with row, column and the flag of the
    column.
    """
    try:
        return to_messages(row[column], role=role)
    except ValueError as error:
        raise row_error(row, column, f"{error}. {flag} names this column.") from error


def to_messages(value: Any, *, role: str = "user") -> list[Message]:
    """A value as chat messages. A string is one message of `role`, or a transcript of HH-RLHF; a
    list is checked.

    Messages may have `from` and `value`, as in ShareGPT; a single message needs no list; a content
    may be the parts of a text. A null field of a message is the same as none; nulls inside tool
    calls stay. Raises ValueError that names the malformed message and its fault.
    """
    if isinstance(value, str):
        return _turns(value) or [{"role": role, "content": value}]
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list) or not value:
        seen = "an empty list" if value == [] else kind(value)
        raise ValueError(f"is {seen}, not a string or a list of chat messages")
    return [_to_message(message, number) for number, message in enumerate(value)]


def _turns(text: str) -> list[Message]:
    """The messages of a transcript; none if the text does not begin like one."""
    opening, *turns = TRANSCRIPT.split(text)
    said = [] if opening else zip(turns[::2], turns[1::2], strict=True)
    return [{"role": SPEAKERS[speaker], "content": words.strip()} for speaker, words in said]


def _to_message(message: Any, number: int) -> Message:
    if not isinstance(message, dict):
        raise ValueError(
            f"message {number} is {kind(message)}, not an object with role and content"
        )
    present = {field: part for field, part in message.items() if part is not None}
    if "role" not in present and {"from", "value"} <= present.keys():
        speaker, value = present.pop("from"), present.pop("value")
        said: Message = {"content": value}
        if speaker == "function_call":
            try:
                said = {"tool_calls": [{"type": "function", "function": json.loads(value)}]}
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"the function_call of message {number} is no JSON: {value!r}"
                ) from error
        present = {"role": SPEAKERS.get(str(speaker), speaker), **said, **present}
    if "role" not in present or not ("content" in present or present.get("tool_calls")):
        has = ", ".join(map(repr, present)) or "nothing"
        raise ValueError(f"message {number} needs 'role' and 'content', but has {has}")
    role, content = present["role"], present.get("content", "")
    if _are_objects(content):
        if other := {part.get("type") or "text" for part in content} - {"text"}:
            held = ", ".join(sorted(map(repr, other)))
            raise ValueError(
                f"the content of message {number} has parts of type {held}; the policy reads text only"
            )
        content = "".join(str(part.get("text") or "") for part in content)
    if not isinstance(content, str):
        raise ValueError(
            f"the content of message {number} must be a string or a list of texts, not {kind(content)}"
        )
    present["content"] = content
    if role not in ROLES:
        raise ValueError(f"the role of message {number} is {role!r}, not one of {', '.join(ROLES)}")
    calls = present.get("tool_calls") or []
    if not _are_objects(calls) or not _are_objects([call.get("function") or {} for call in calls]):
        raise ValueError(
            f"the tool_calls of message {number} must be a list of objects, not {calls!r}"
        )
    return with_parsed_arguments(present)


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(part, dict) for part in value)


def with_parsed_arguments(message: Message) -> Message:
    """The message with the arguments of its tool calls as objects, as chat templates want them."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = {
            **(call.get("function") or call)
        }  # some calls have name and arguments themselves
        with suppress(TypeError, ValueError):
            function["arguments"] = json.loads(function.get("arguments") or "{}")
        calls.append({**call, "function": function} if call.get("function") else function)
    return {**message, "tool_calls": calls}


def tools_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The definitions of tools in the column `tools`, a list or JSON. Raises DataError for anything
    else.
    """
    tools = row.get(TOOLS)
    try:
        tools = json.loads(tools) if isinstance(tools, str) and tools else tools or []
    except ValueError as error:
        raise row_error(row, TOOLS, f"is a string, but no JSON: {error}.") from error
    if not _are_objects(tools):
        raise row_error(row, TOOLS, f"is {kind(tools)}, not a list of definitions of tools.")
    return tools


def learned_turns(messages: Sequence[Message], *, chosen: bool) -> list[int]:
    """The turns of the assistant; if they are `chosen`, without those whose field `loss` or
    `weight` is false or 0.

    Raises ValueError for a field with another value, of somebody else's turn that would be learned,
    or that is not read.
    """
    turns: list[int] = []
    for number, message in enumerate(messages):
        role, field = message["role"], next((name for name in LEARNED if name in message), None)
        wanted = message[field] if field else role == "assistant"
        if wanted not in ((0, 1) if role == "assistant" else (0,)) or (field and not chosen):
            allowed = "true or 1 is for turns of the assistant, false or 0 for all"
            needed = allowed if chosen else "only --data.multiturn reads it"
            raise ValueError(f"message {number}, of the {role}, has {field} {wanted!r}: {needed}")
        turns += [number] * bool(wanted)
    return turns


def texts_in(value: Any) -> list[str]:
    """The strings in a value: the value itself, or the contents of chat messages."""
    if isinstance(value, list):
        return [text for part in value if isinstance(part, dict) for text in texts_in(part)]
    if isinstance(value, dict):
        return texts_in(value.get("content") or value.get("value") or value.get("text"))
    return [value] if isinstance(value, str) else []


def render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], **options: Any) -> str:
    """The messages through the chat template, with the options of `render_marked`. Raises
    ValueError as it does.
    """
    return render_marked(tokenizer, messages, **options)[0]


def rendered_question(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a user's message in the chat template; the template itself if it needs more, such as a
    system message.
    """
    try:
        return render(tokenizer, [{"role": "user", "content": ANSWER}], add_generation_prompt=True)
    except ValueError:
        return str(tokenizer.chat_template)


def chat_marks(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the added tokens of the tokenizer that the chat template writes."""
    rendered = rendered_question(tokenizer)
    return [token for token in added_tokens(tokenizer) if token in rendered]


def render_marked(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = False,
    tools: Sequence[dict[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> tuple[str, list[Span]]:
    """The text, and the spans that the template's `{% generation %}` blocks wrote, if there are
    such blocks.

    `variables` are further variables of the template, such as `enable_thinking`. Raises ValueError
    with the error message of the template.
    """
    template = tokenizer.get_chat_template()
    special_tokens: dict[str, Any] = tokenizer.special_tokens_map
    try:
        rendered: Any = render_jinja_template(
            conversations=[list(messages)],
            tools=list(tools) if tools else None,
            chat_template=template,
            return_assistant_tokens_mask="endgeneration" in template,
            add_generation_prompt=add_generation_prompt,
            **(special_tokens | clock_of(tokenizer) | dict(variables or {})),
        )
    except (jinja2.TemplateError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"the chat template cannot render these messages: {error}") from error
    texts, spans = rendered
    return texts[0], spans[0] if spans else []


@dataclass(frozen=True, kw_only=True)
class Passage:
    """A text to train on, the spans of its targets, and the start of the response, in characters."""

    text: str
    spans: list[Span]
    response: int
    rewritten: int = 0  # assistant turns that are no targets, because the template changes them
    unended: int = (
        0  # targets before the last one that end without a text at which generation stops
    )
    empty: int = (
        0  # assistant turns that are no targets, because the template leaves their tool calls out
    )
    lost: str = ""  # a tool that the template leaves out

    def closed(self, ends: Sequence[str], marks: Sequence[str] = (), *, space: bool = True) -> Self:
        """Return the passage without trailing newlines and with an end: one of `ends`, at which
        generation stops.

        If it has none of them, the first is added, with `space` after a space unless one of `marks`
        is there. The added end is a target if the text before it is one.
        """
        text = self.text.rstrip("\n")
        if text.endswith(tuple(ends)):
            closed = text
        elif not space or text.endswith(tuple(marks)):
            closed = text + ends[0]
        else:
            closed = f"{text} {ends[0]}"
        spans: list[Span] = []
        for start, end in self.spans:
            if end >= len(text):
                end = len(closed)
            spans.append((start, end))
        return replace(self, text=closed, spans=spans)

    def with_ended_turns(self, ends: Sequence[str]) -> Self:
        """Return the passage with the role marker after each turn as a target, if generation stops
        at the marker.

        Some templates close a turn with nothing but the marker of the next turn. `unended` counts
        the turns before the last that have no end even so.
        """
        spans, unended = list[Span](), 0
        for start, end in self.spans:
            marker = next((mark for mark in ends if self.text.startswith(mark, end)), "")
            if any(mark in self.text[start:end] for mark in ends):
                marker = ""
            elif not marker and end < len(self.text.rstrip("\n")):
                unended += 1
            spans.append((start, end + len(marker)))
        return replace(self, spans=spans, unended=unended)


def render_conversation(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    first: int = -1,
    turns: Sequence[int] = (),
    tools: Sequence[dict[str, Any]] | None = None,
) -> Passage:
    """A conversation that ends with the assistant, with its targets.

    Targets are everything from message `first` on, which is the assistant's, or these `turns` of
    the assistant. If the template has `{% generation %}` marks, only marked text is a target.
    Without marks a turn is the text after the generation prompt and before the next message. If the
    template rewrites history (drops earlier reasoning), a turn is its content and the end of turn
    after it; an earlier turn whose content was changed is no target. Raises ValueError if message
    `first`, or the last of `turns`, cannot be found.
    """
    draw: Draw = partial(render_marked, tokenizer, tools=tools)
    text, marked = draw(messages)
    first %= len(messages)
    if marked:
        spans = _marked(draw, messages, marked, first, turns)
        return Passage(text=text, spans=spans, response=spans[-1 if turns else 0][0])
    wanted = turns or [first]
    found = [_find_turn(draw, messages, turn, text) for turn in wanted]
    if found[-1] is None:
        raise ValueError(
            f"the chat template changes message {wanted[-1]} of the assistant (it may drop reasoning), so the tokens of "
            "the message cannot be found. Mark the assistant's words with {% generation %} and {% endgeneration %} in "
            "the template, and pass the template as --data.tokenizer_chat_template"
        )
    spans = [span for span in found if span is not None]
    if not turns and first < len(messages) - 1:
        spans = [(spans[0][0], len(text))]
    return Passage(text=text, spans=spans, response=spans[-1][0], rewritten=found.count(None))


def _marked(
    draw: Draw, messages: Sequence[Message], marked: list[Span], first: int, turns: Sequence[int]
) -> list[Span]:
    """The marked spans from message `first` on, or those of `turns`, found by counting the marks
    before each turn.
    """

    def before(turn: int) -> int:
        if not turn:
            return 0
        try:
            return len(draw(messages[:turn])[1])
        except ValueError:  # a beginning that the template forbids, for example without a user
            return sum(message["role"] == "assistant" for message in messages[:turn])

    if not turns:
        return marked[before(first) :] or marked[-1:]
    if len(turns) == sum(message["role"] == "assistant" for message in messages):
        return marked
    return [span for turn in turns for span in marked[before(turn) : before(turn + 1)]] or marked[
        -1:
    ]


def _find_turn(draw: Draw, messages: Sequence[Message], turn: int, text: str) -> Span | None:
    if turn:
        with suppress(
            ValueError
        ):  # a beginning that the template forbids, for example without a user
            through, _ = draw(messages[: turn + 1])
            prompt, _ = draw(messages[:turn], add_generation_prompt=True)
            if text.startswith(prompt) and text.startswith(through) and len(prompt) < len(through):
                return len(prompt), len(through)
    if any(messages[turn].get(field) for field in REASONING):
        return None
    return _find_content(draw, messages, turn, text)


def _find_content(draw: Draw, messages: Sequence[Message], turn: int, text: str) -> Span | None:
    """The span of a turn's content in `text`: between the texts before and after a placeholder for
    the content.
    """
    past = [*messages[:turn], {**messages[turn], "content": STAND_IN}]
    before, _, after = draw([*past, *messages[turn + 1 :]])[0].partition(STAND_IN)
    end = len(text) - len(after)
    found = text.startswith(before) and text.endswith(after)
    if not found or text[len(before) : end].strip() != messages[turn]["content"].strip():
        return None
    try:
        last, _ = draw(past)
    except (
        ValueError
    ):  # a beginning that the template forbids: take the end of the whole conversation
        last, _ = draw([*messages[:-1], {**messages[-1], "content": STAND_IN}])
    end_of_turn = last.partition(STAND_IN)[2]
    return len(before), end + in_common(end_of_turn, after)


def in_common(a: Sequence[Any], b: Sequence[Any]) -> int:
    """The number of items at the start that both have in common."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((place for place, (x, y) in pairs if x != y), min(len(a), len(b)))


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """A text's tokens, and the characters [start, end) of each token if the tokenizer knows them."""

    text: str
    tokens: list[int]
    offsets: list[Span] | None
    tokenizer: PreTrainedTokenizerBase

    def tokens_of(self, span: Span) -> range:
        """The tokens of a span of characters. A token that straddles the border of the span belongs
        to it.

        If the tokenizer has no offsets, the text before each border is encoded: the tokens in
        common come before the border.

        Example, the text "Q: yes" as `Q`, `:`, `▁yes` and the span (3, 6) of "yes": range(2, 3).
        """
        if self.offsets is None:
            return range(*map(self._tokens_before, span))
        # Compare ends, not starts: some offsets leave out the space before a word.
        first, last = (bisect_right(self.offsets, border, key=itemgetter(1)) for border in span)
        while last < len(self.offsets) and self.offsets[last][0] < span[1]:
            last += 1
        return range(first, last)

    def _tokens_before(self, border: int) -> int:
        before = self.tokenizer(self.text[:border], add_special_tokens=False)["input_ids"]
        return in_common(self.tokens, before)


def cut(
    tokens: Sequence[int],
    max_len: int,
    tokenizer: PreTrainedTokenizerBase,
    ends: Collection[int] = (),
) -> list[int]:
    """Return at most `max_len` tokens, the last of which is end-of-text, or one of `ends` if
    nothing is cut.
    """
    if len(tokens) <= max_len and tokens[-1] in ends:
        return list(tokens)
    end_of_text: Any = tokenizer.eos_token_id
    return [*tokens[:max_len][:-1], end_of_text]


def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[Encoded]:
    """The texts as tokens, without the special tokens that a tokenizer would add around them."""
    if not texts:
        return []
    with_offsets = bool(tokenizer.is_fast)
    known: Mapping[str, Any] = tokenizer(
        list(texts), add_special_tokens=False, return_offsets_mapping=with_offsets, verbose=False
    )
    offsets = known["offset_mapping"] if with_offsets else [None] * len(texts)
    return [
        Encoded(text=text, tokens=tokens, offsets=where, tokenizer=tokenizer)
        for text, tokens, where in zip(texts, known["input_ids"], offsets, strict=True)
    ]
