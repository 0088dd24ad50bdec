"""Detection of control tokens, such as the end-of-turn token, in a dataset's texts.

The model cannot distinguish them from the control tokens that a chat template inserts.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from transformers import PreTrainedTokenizerBase

from openrlhf.checks import Finding
from openrlhf.data.messages import texts_in
from openrlhf.data.templates import chat_marks


@dataclass(frozen=True, kw_only=True)
class ControlTokens:
    """A matcher for a tokenizer's special tokens in texts.

    `marks` are the tokens that the chat template inserts. A text that contains all of them is
    considered already rendered. `in_chats` is true if the texts are message contents that a
    template renders.
    """

    pattern: re.Pattern[str] | None
    marks: list[str]
    in_chats: bool

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, *, in_chats: bool) -> Self:
        """Return a matcher for this tokenizer's special tokens."""
        added: Mapping[int, Any] = tokenizer.added_tokens_decoder
        names = set(tokenizer.all_special_tokens)
        for token in added.values():
            if token.special:
                names.add(str(token))
        longest_first = sorted(filter(str.strip, names), key=len, reverse=True)
        pattern = None
        if longest_first:
            pattern = re.compile("|".join(map(re.escape, longest_first)))
        marks: list[str] = []
        if tokenizer.chat_template:
            marks = chat_marks(tokenizer)
        return cls(pattern=pattern, marks=marks, in_chats=in_chats)

    def first_in(self, values: Sequence[Any]) -> str:
        """Return the first control token in texts or message contents, or "" if there is none.

        Control tokens at the end of a plain text, or in an already rendered one, are ignored.
        """
        for value in values:
            for text in texts_in(value):
                found = self.found_in(text)
                if found:
                    return found[0]
        return ""

    def found_in(self, text: str) -> list[str]:
        """Return the control tokens in a text.

        In plain texts, tokens at the end and tokens in already rendered texts are ignored.
        """
        if not self.pattern:
            return []
        found = list(self.pattern.finditer(text))
        if not self.in_chats:
            if self.marks and all(mark in text for mark in self.marks):
                return []
            end = len(text.rstrip())
            while found and found[-1].end() == end:
                last = found.pop()
                end = len(text[: last.start()].rstrip())
        return [each.group() for each in found]


def check_control_tokens(
    found: Sequence[str | None], *, what: str, first: str, rendered: bool
) -> list[Finding]:
    """Return a notice that counts the rows with control tokens.

    `found` contains the first control token of each row, if any. `first` names the first row that
    has one. With `rendered`, the rows may already be rendered, so control tokens are expected: no
    notice is returned if most rows have them.
    """
    count = sum(map(bool, found))
    if rendered and 2 * count > len(found):
        return []
    token = next(filter(None, found))
    seen = (
        f"{count} of {len(found)} {what}s contain control tokens, which the model reads as "
        f"boundaries between turns or texts. The first is {first} with {token!r}."
    )
    fix = "Unless this is intended, remove these tokens from the data or spell them differently."
    return [Finding(seen, fix)]
