"""Renders chat messages, and finds the assistant's characters and tokens in the text."""

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import Any, Self

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from openrlhf.data.clock import clock_of
from openrlhf.data.messages import Message
from openrlhf.data.tokenizer import added_tokens

Span = tuple[int, int]  # [start, end) in characters of a text
# A function that renders messages to a text and the spans marked by the template.
Draw = Callable[..., tuple[str, list[Span]]]

ANSWER = "(the answer)"
STAND_IN = "<<what the assistant said>>"
REASONING = ("reasoning_content", "reasoning", "thinking")  # message fields that contain reasoning


def fill_template(template: str | None, text: str) -> str:
    """Return `template` with its `{}` replaced by `text`.

    Other braces are kept.
    """
    if template is None:
        return text
    try:
        return template.format(text)
    except (ValueError, LookupError, AttributeError):  # a template like '{"question": "{}"}'
        return template.replace("{}", text, 1)


def render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], **options: Any) -> str:
    """Return messages as text, rendered by the chat template.

    See `render_marked` for options and errors.
    """
    return render_marked(tokenizer, messages, **options)[0]


def rendered_question(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a user message rendered by the chat template.

    If the template requires more than a user message, such as a system message, return the template
    itself.
    """
    try:
        return render(tokenizer, [{"role": "user", "content": ANSWER}], add_generation_prompt=True)
    except ValueError:
        return str(tokenizer.chat_template)


def chat_marks(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the tokenizer's added tokens that the chat template inserts."""
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
    """Return the rendered text and the spans from the template's `{% generation %}` blocks.

    `variables` are additional template variables, such as `enable_thinking`. Raises ValueError with
    the template's error message.
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
    [text], spans = rendered
    if not spans:
        return text, []
    return text, spans[0]


@dataclass(frozen=True, kw_only=True)
class Passage:
    """A text to train on, with the spans of its targets.

    `response` is the character index where the response begins, for rows that need it. `rewritten`
    and `empty` count assistant turns that are not targets because the template changes them or
    omits their tool calls. `unended` counts targets before the last one that do not end with a stop
    text.
    """

    text: str
    spans: list[Span] = field(default_factory=list[Span])
    response: int = 0
    rewritten: int = 0
    unended: int = 0
    empty: int = 0
    lost: str = ""  # a tool that the template omits, if any
    exchange: bool = False  # for pairs: whether a user or a tool speaks after the shared prompt

    def closed(self, ends: Sequence[str], marks: Sequence[str] = (), *, space: bool = True) -> Self:
        """Return the passage with trailing newlines removed, ending with one of `ends`.

        `ends` are the texts that stop generation. If the text ends with none of `ends`, append the
        first one. With `space`, put a space before the appended end unless the text ends with one
        of `marks`. The appended end is a target if the text before it is a target.
        """
        text = self.text.rstrip("\n")
        closed = text
        if not text.endswith(tuple(ends)):
            separator = " " if space and not text.endswith(tuple(marks)) else ""
            closed = f"{text}{separator}{ends[0]}"
        spans: list[Span] = []
        for start, end in self.spans:
            spans.append((start, end if end < len(text) else len(closed)))
        return replace(self, text=closed, spans=spans)

    def with_ended_turns(self, ends: Sequence[str]) -> Self:
        """Return the passage with each turn extended by the stop text that follows it, if any.

        Some templates end a turn only with the next turn's role marker. `unended` counts the turns
        without a stop text, excluding the last turn.
        """
        spans: list[Span] = []
        unended = 0
        for start, end in self.spans:
            marker = ""
            if not any(mark in self.text[start:end] for mark in ends):
                marker = next((mark for mark in ends if self.text.startswith(mark, end)), "")
                if not marker and end < len(self.text.rstrip("\n")):
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
    """Render a conversation that ends with an assistant message, and find its targets.

    The targets are everything from the assistant message `first` on, or the assistant messages
    `turns`. If the template has `{% generation %}` marks, only marked text is a target. Without
    marks, a turn is the text between the generation prompt and the next message. If the template
    rewrites history (for example, drops earlier reasoning), a turn is its content and the
    end-of-turn text after it; an earlier turn whose content was changed is not a target. Raises
    ValueError if message `first` or the last of `turns` cannot be found in the text.
    """
    draw: Draw = partial(render_marked, tokenizer, tools=tools)
    text, marked = draw(messages)
    first %= len(messages)
    if marked:
        spans = _marked_turns(draw, messages, marked, first, turns)
        response_span = spans[-1] if turns else spans[0]
        return Passage(text=text, spans=spans, response=response_span[0])
    wanted = turns or [first]
    spans = []
    span = None
    for turn in wanted:
        span = _find_turn(draw, messages, turn, text)
        if span is not None:
            spans.append(span)
    if span is None:
        raise ValueError(
            f"the chat template changes assistant message {wanted[-1]} (it may drop reasoning). "
            "Mark the assistant's text in the template with {% generation %} and "
            "{% endgeneration %}, and pass it as --data.tokenizer_chat_template"
        )
    rewritten = len(wanted) - len(spans)
    if not turns and first < len(messages) - 1:
        spans = [(spans[0][0], len(text))]
    return Passage(text=text, spans=spans, response=spans[-1][0], rewritten=rewritten)


def _marked_turns(
    draw: Draw, messages: Sequence[Message], marked: list[Span], first: int, turns: Sequence[int]
) -> list[Span]:
    """Return the marked spans from message `first` on, or the marked spans of `turns`.

    A turn's spans are found by counting the marks before it.
    """

    def marks_before(turn: int) -> int:
        if not turn:
            return 0
        try:
            return len(draw(messages[:turn])[1])
        except ValueError:  # the template may reject these messages, e.g. without a user turn
            return _count_assistant(messages[:turn])

    if not turns:
        return marked[marks_before(first) :] or marked[-1:]
    if len(turns) == _count_assistant(messages):
        return marked
    spans: list[Span] = []
    for turn in turns:
        spans += marked[marks_before(turn) : marks_before(turn + 1)]
    return spans or marked[-1:]


def _count_assistant(messages: Sequence[Message]) -> int:
    return sum(message["role"] == "assistant" for message in messages)


def _find_turn(draw: Draw, messages: Sequence[Message], turn: int, text: str) -> Span | None:
    """Return a turn's span in `text`, or None if the template changed the turn."""
    if turn:
        with suppress(ValueError):  # the template may reject these messages
            through, _ = draw(messages[: turn + 1])
            prompt, _ = draw(messages[:turn], add_generation_prompt=True)
            if text.startswith(prompt) and text.startswith(through) and len(prompt) < len(through):
                return len(prompt), len(through)
    if any(messages[turn].get(field) for field in REASONING):
        return None
    return _find_content(draw, messages, turn, text)


def _find_content(draw: Draw, messages: Sequence[Message], turn: int, text: str) -> Span | None:
    """Return the span of a turn's content in `text`, or None if the template changed the content.

    Rendering a placeholder instead of the content reveals the text before and after the content.
    """
    past = [*messages[:turn], {**messages[turn], "content": STAND_IN}]
    before, _, after = draw([*past, *messages[turn + 1 :]])[0].partition(STAND_IN)
    end = len(text) - len(after)
    found = text.startswith(before) and text.endswith(after)
    if not found or text[len(before) : end].strip() != messages[turn]["content"].strip():
        return None
    try:
        last, _ = draw(past)
    except ValueError:  # the template rejects these messages: render the full conversation instead
        last, _ = draw([*messages[:-1], {**messages[-1], "content": STAND_IN}])
    end_of_turn = last.partition(STAND_IN)[2]
    return len(before), end + in_common(end_of_turn, after)


def in_common(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return the length of the common prefix of two sequences."""
    for place, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return place
    return min(len(a), len(b))


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """A text's tokens, with each token's span in characters if the tokenizer has offsets."""

    text: str
    tokens: list[int]
    offsets: list[Span] | None
    tokenizer: PreTrainedTokenizerBase

    def tokens_of(self, span: Span) -> range:
        """Return the range of tokens that cover a span of characters.

        A token that straddles a boundary belongs to the span. Without offsets, the text before each
        boundary is encoded; the tokens that it shares with the complete text are before the
        boundary.

        Example: if "Q: yes" is tokenized as `Q`, `:`, `▁yes`, the span (3, 6) of "yes" gives
        range(2, 3).
        """
        if self.offsets is None:
            return range(*map(self._tokens_before, span))
        start, end = span
        # Compare the ends of tokens, because some starts exclude the space before a word.
        first = bisect_right(self.offsets, start, key=itemgetter(1))
        last = bisect_right(self.offsets, end, key=itemgetter(1))
        while last < len(self.offsets) and self.offsets[last][0] < end:
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
    """Truncate to `max_len` tokens, the last of which is end-of-text.

    If the text is not truncated, its last token may also be one of `ends`.
    """
    if len(tokens) <= max_len and tokens[-1] in ends:
        return list(tokens)
    end_of_text: Any = tokenizer.eos_token_id
    return [*tokens[:max_len][:-1], end_of_text]


def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[Encoded]:
    """Tokenize texts without adding special tokens."""
    if not texts:
        return []
    with_offsets = bool(tokenizer.is_fast)
    known: Mapping[str, Any] = tokenizer(
        list(texts), add_special_tokens=False, return_offsets_mapping=with_offsets, verbose=False
    )
    offsets = known["offset_mapping"] if with_offsets else [None] * len(texts)
    encoded: list[Encoded] = []
    for text, tokens, spans in zip(texts, known["input_ids"], offsets, strict=True):
        encoded.append(Encoded(text=text, tokens=tokens, offsets=spans, tokenizer=tokenizer))
    return encoded
