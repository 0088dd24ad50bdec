"""Control tokens, such as the end of a turn, inside user-written texts: the model reads them like a
template's own.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from transformers import PreTrainedTokenizerBase

from openrlhf.data.findings import Finding, Level
from openrlhf.data.templates import chat_marks, texts_in

CHECK = "control tokens in texts"


@dataclass(frozen=True, kw_only=True)
class ControlTokens:
    """The special tokens of a tokenizer, as they are found in texts.

    `marks`: those that the chat template writes; a text with all of them has been rendered.
    `in_chats`: the texts are contents of messages, which a template renders.
    """

    pattern: re.Pattern[str] | None
    marks: list[str]
    in_chats: bool

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, *, in_chats: bool) -> Self:
        """Return the special tokens of a tokenizer."""
        added: Mapping[int, Any] = tokenizer.added_tokens_decoder
        names = {str(token) for token in added.values() if token.special} | set(
            tokenizer.all_special_tokens
        )
        longest_first = sorted((name for name in names if name.strip()), key=len, reverse=True)
        pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        marks = chat_marks(tokenizer) if tokenizer.chat_template else []
        return cls(pattern=pattern, marks=marks, in_chats=in_chats)

    def first_in(self, values: Sequence[Any]) -> str:
        """Return the first control token in texts, or in the contents of messages; empty if there
        is none.

        A plain text may end with control tokens, and may have been rendered.
        """
        for value in values:
            for text in texts_in(value):
                found = self.found_in(text)
                if found:
                    return found[0]
        return ""

    def found_in(self, text: str) -> list[str]:
        """Return the control tokens in a text, except those that come from rendering or end the
        text.
        """
        found = list(self.pattern.finditer(text)) if self.pattern else []
        if not self.in_chats:
            if self.marks and all(mark in text for mark in self.marks):
                return []
            end = len(text.rstrip())
            while found and found[-1].end() == end:
                end = len(text[: found.pop().start()].rstrip())
        return [each.group() for each in found]


def check_control_tokens(found: Sequence[str], *, what: str, first: str, rendered: bool) -> Finding:
    """Return a warning if rows have control tokens: `found` has the first of each row, `first`
    names the first such row.

    `rendered`: the rows may be rendered texts, in which control tokens are expected. They are if
    most rows have some.
    """
    count = sum(map(bool, found))
    if not count or (rendered and 2 * count > len(found)):
        return Finding(
            check=CHECK, level=Level.PASS, seen=f"No {what} has control tokens inside its texts."
        )
    token = next(filter(None, found))
    return Finding(
        check=CHECK,
        level=Level.WARNING,
        seen=f"{count} of {len(found)} {what}s contain control tokens of the tokenizer, which the model reads "
        f"as boundaries of turns or texts. The first: {first} has {token!r}.",
        fix="Unless they are intended, remove such tokens from the data, or write them differently.",
    )
