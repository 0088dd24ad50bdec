"""Detects control tokens, such as the end-of-turn token, in a dataset's texts.

The model cannot distinguish these tokens from the control tokens that a chat template inserts.
"""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from openrlhf.data.messages import texts_in
from openrlhf.data.templates import chat_marks
from openrlhf.data.tokenizer import any_of


class ControlTokens:
    """A matcher for a tokenizer's special tokens in texts.

    A plain text that contains all tokens that the chat template inserts is considered already
    rendered. `in_chats` is true if the texts are message contents that a template renders.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, in_chats: bool) -> None:
        names = set(tokenizer.all_special_tokens)
        added: Any = tokenizer.added_tokens_decoder
        names.update(str(token) for token in added.values() if token.special)
        self.names = sorted(filter(str.strip, names), key=len, reverse=True)
        self.pattern = any_of(self.names)
        self.in_chats = in_chats
        self.marks: list[str] = []
        if tokenizer.chat_template:
            self.marks = chat_marks(tokenizer)

    def first_in(self, values: Sequence[Any]) -> str:
        """Return the first control token in texts or message contents, or "" if there is none.

        Control tokens at the end of a plain text, or anywhere in an already rendered text, are
        ignored.
        """
        for value in values:
            for text in texts_in(value):
                if not self.in_chats:
                    text = self._without_ending(text)
                found = self.pattern.search(text)
                if found:
                    return found[0]
        return ""

    def _without_ending(self, text: str) -> str:
        if self.marks and all(mark in text for mark in self.marks):
            return ""
        text = text.rstrip()
        while token := next(filter(text.endswith, self.names), ""):
            text = text.removesuffix(token).rstrip()
        return text
