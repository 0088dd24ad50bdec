"""Rows for supervised fine-tuning: tokens with their loss mask."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from openrlhf.config.inference import InferenceDataConfig
from openrlhf.config.supervised import KTODataConfig, SFTDataConfig
from openrlhf.data import templates
from openrlhf.data.errors import DataError, list_columns, row_error, source_of, text_of
from openrlhf.data.lost_tools import ONLY_CALLS, lost_tools
from openrlhf.data.messages import learned_turns, messages_of, tools_of
from openrlhf.data.rows import Result, TokenizedRows
from openrlhf.data.templates import Encoded, Passage, cut, fill_template
from openrlhf.data.tokenizer import Ends
from openrlhf.reporting import notice

# Config sections that set the columns, the templates and `max_len` for texts.
TextSection = SFTDataConfig | KTODataConfig | InferenceDataConfig
# Reasons for dropping a row.
NO_PROMPT = "with an empty prompt"
NO_RESPONSE = "with an empty response"
TOO_SHORT = "with fewer than two tokens"
NOT_LEARNED = "without a turn to train on"


@dataclass(frozen=True, kw_only=True)
class SFTRow:
    """A training text of T tokens.

    Token t is a target if `loss_mask[t]` is true; the first token is never a target.

    Example: the prompt "Q: " and the response "yes" (made-up ids):

        tokens    [4, 7, 9, 2]     Q  :  ▁yes  <eos>
        loss_mask [F, F, T, T]
    """

    tokens: list[int]
    loss_mask: list[bool]


class SFTDataset(TokenizedRows[SFTRow]):
    """A dataset's rows as tokens and loss masks, tokenized when the object is created.

    `data` sets the columns, the templates and `max_len`. A text is a prompt with a response, or a
    rendered conversation. Trailing newlines are removed, end-of-text is appended (after a space) if
    it is missing, and the text is truncated to `max_len` tokens, the last of which is always
    end-of-text and a target.

    The response is the output column with all its messages or, if there is no output column, the
    last assistant message. With `multiturn`, the response is every assistant message whose `loss`
    or `weight` field, if present, is not false or 0. A turn that consists only of tool calls is not
    a target if the template omits them. Messages after the last target message are removed. The
    `tools` column is passed to the chat template. In pretrain mode, a text is the unchanged input
    column, and every token except the first is a target.

    Rows with an empty prompt or response, or with a prompt of at least `max_len` − 2 tokens, are
    dropped and counted in `summary`. Raises DataError if a column is missing, if rows are malformed
    (the message names the first rows), or if all rows are dropped.
    """

    row: ClassVar[Any] = SFTRow
    keys = ("input_key", "output_key")

    def __init__(
        self,
        dataset: Dataset,
        tokenizer: PreTrainedTokenizerBase,
        data: TextSection,
        *,
        pretrain: bool = False,
    ) -> None:
        self.pretrain = pretrain
        if data.multiturn and not data.apply_chat_template:
            raise DataError(
                "--data.multiturn requires --data.apply_chat_template, because only chats have "
                "turns."
            )
        if pretrain:
            data = replace(data, output_key=None, apply_chat_template=False)
        has_answers = pretrain or data.output_key or data.apply_chat_template
        columns = dataset.column_names
        if not has_answers and data.input_key in columns:  # `columns_read` reports a missing column
            raise DataError(
                f"No column with answers was found in {source_of(dataset)}: --data.output_key is "
                f"not set. The columns are {list_columns(columns)}. Set --data.output_key to the "
                "column with the answers (--data.output_key chosen for pairs, or train on them "
                "with `openrlhf dpo`), or pass --data.apply_chat_template for chats."
            )
        self.ends = Ends.of(tokenizer)
        super().__init__(dataset, tokenizer, data)
        unended = sum(self.rows["unended"])
        if unended:
            notice(
                f"{unended} trained turns before the last one do not end with a stop token "
                f"({', '.join(self.ends.texts)}). Add the end-of-turn token to eos_token_id in "
                "generation_config.json, or to the chat template."
            )
        rewritten = sum(self.rows["rewritten"])
        if rewritten:
            self.summary += (
                f" {rewritten} assistant turns are not trained on because the chat template "
                "rewrites them."
            )

    def passages(self, row: Mapping[str, Any]) -> list[Passage] | str:
        """Return the text and its targets, or the reason for dropping the row."""
        if self.data.apply_chat_template:
            return self._conversation(row)
        prompt = text_of(row, self.data.input_key)
        if self.pretrain:
            return [Passage(text=prompt, spans=[(0, len(prompt))])]
        response = ""
        if self.data.output_key:
            response = text_of(row, self.data.output_key)
        prompt = fill_template(self.data.input_template, prompt)
        if not prompt:
            return NO_PROMPT
        if not response:
            return NO_RESPONSE
        text = prompt + response
        passage = Passage(text=text, spans=[(len(prompt), len(text))], response=len(prompt))
        return [passage.closed(self.ends.texts, space=self.data.space_before_eos)]

    def _conversation(self, row: Mapping[str, Any]) -> list[Passage] | str:
        messages = messages_of(row, self.data.input_key, role="user", flag="--data.input_key")
        asked = len(messages)
        tools = tools_of(row)
        if self.data.output_key:
            messages += messages_of(
                row, self.data.output_key, role="assistant", flag="--data.output_key"
            )
        try:
            learned = learned_turns(messages, chosen=self.data.multiturn)
            if not learned:
                return NOT_LEARNED
            messages = messages[: learned[-1] + 1]
            if len(messages) < 2:
                return NO_PROMPT
            answers = [turn for turn in learned if turn >= asked]
            targets = learned if self.data.multiturn else answers or learned[-1:]
            lost = lost_tools(self.tokenizer, messages, tools)
            kept = [turn for turn in targets if turn not in lost.turns]
            if not kept:
                return ONLY_CALLS
            if not kept[-1]:
                return NO_PROMPT
            messages = messages[: kept[-1] + 1]
            if not messages[-1]["content"] and not messages[-1].get("tool_calls"):
                return NO_RESPONSE
            empty = len(targets) - len(kept)
            turns = kept if self.data.multiturn or empty else []
            passage = templates.render_conversation(
                self.tokenizer, messages, first=targets[0], turns=turns, tools=tools
            )
        except ValueError as error:
            raise row_error(row, self.data.input_key, f"{error}.") from error
        ended = replace(passage, empty=empty, lost=lost.first).with_ended_turns(self.ends.texts)
        return [ended.closed(self.ends.texts, self.ends.marks, space=self.data.space_before_eos)]

    def columns(
        self, row: Mapping[str, Any], passages: list[Passage], encoded: list[Encoded]
    ) -> Result:
        """Return the columns of a tokenized row, or the reason for dropping it."""
        [passage] = passages
        [known] = encoded
        max_len = self.data.max_len
        limit = max_len - 2
        tokens = known.tokens[:max_len]
        if len(tokens) < 2:
            return TOO_SHORT
        prompt_tokens = known.tokens_of((passage.response, len(passage.text))).start
        if not self.pretrain and prompt_tokens >= limit:
            return f"with a prompt of {limit} tokens or more (--data.max_len {max_len})"
        mask = [False] * len(tokens)
        for span in passage.spans:
            places = known.tokens_of(span)
            for place in range(max(places.start, 1), min(places.stop, len(tokens))):
                mask[place] = True
        if not self.pretrain:
            tokens = cut(known.tokens, max_len, self.tokenizer, self.ends.ids)
            mask[-1] = True
        return {
            "tokens": tokens,
            "loss_mask": mask,
            "rewritten": passage.rewritten,
            "unended": passage.unended,
            "cut": len(known.tokens) > len(tokens),
        }
