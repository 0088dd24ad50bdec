"""Looks at the first rows of every run before a model is loaded.

A certain mistake is an error, a likely mistake a notice. The functions are pure: they return the
notices, and raise DataError.
"""

import hashlib
import re
import unicodedata
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any, Self

from transformers import PreTrainedTokenizerBase

from openrlhf.data.clock import MOMENT, NAME, clock_at
from openrlhf.data.errors import DataError
from openrlhf.data.findings import Finding, Level
from openrlhf.data.first_start import now
from openrlhf.data.layouts import LOOKED_AT
from openrlhf.data.loading import Table
from openrlhf.data.templates import ANSWER, chat_marks, render, texts_in
from openrlhf.data.tokenizer import Ends

RECORD = "openrlhf_format"  # in tokenizer_config.json, which goes wherever the model goes


# ---- the tokenizer


def texts_of(rows: Table, columns: Collection[str]) -> list[str]:
    """The strings in some columns of the first rows: plain values, and contents of chat messages."""
    first = rows[:LOOKED_AT]
    return [
        text for column in columns for value in first.get(column, []) for text in texts_in(value)
    ]


def round_trip(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, prompts: bool = False
) -> list[str]:
    """Notices about texts that change when they are encoded and decoded. Raises DataError for lost
    text.

    Harmless changes: Unicode compatibility forms, added spaces, spaces beside special tokens, runs
    of white space that become one space. A notice: letters that lose case or accents, unknown
    tokens, and with `prompts` any change, since a reward's query is decoded tokens. An error: any
    other lost character, a lost border between two words, or more unknown tokens than known ones.
    """
    changes: list[str] = []
    tokens = (
        tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        if texts
        else []
    )
    for text, ids in zip(texts, tokens, strict=True):
        back = str(
            tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )
        if _survives(_spaced(tokenizer, text), _spaced(tokenizer, back)):
            if prompts and back != text:
                changes = [
                    f"The prompt {text[:200]!r} is decoded as {back[:200]!r}: a reward function that removes the prompt "
                    "from a query by its length, query[len(prompt):], cuts at the wrong place."
                ]
            continue
        problem = (
            f"The tokenizer of {tokenizer.name_or_path!r} changes the data: "
            f"{text[:200]!r} comes back as {back[:200]!r}."
        )
        unknown = ids.count(tokenizer.unk_token_id) if tokenizer.unk_token_id is not None else 0
        if _survives(_plain(_spaced(tokenizer, text)), _plain(_spaced(tokenizer, back))):
            return [f"{problem} The model cannot distinguish upper from lower case, or accents."]
        if 0 < unknown <= len(ids) / 2:
            return [
                f"{problem} {unknown} of {len(ids)} tokens are unknown to it ({tokenizer.unk_token})."
            ]
        raise DataError(
            f"{problem} Text is lost: look at the tokenizer's files, or use the tokenizer that the model came with."
        )
    return changes


def _spaced(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    special = "|".join(map(re.escape, sorted(tokenizer.all_special_tokens, key=len, reverse=True)))
    return unicodedata.normalize("NFKC", re.sub(f"({special})", r" \1 ", text) if special else text)


def _plain(text: str) -> str:
    letters = unicodedata.normalize("NFKD", text.casefold())
    return "".join(letter for letter in letters if not unicodedata.combining(letter))


def _survives(text: str, back: str) -> bool:
    """Whether both have the same characters but for white space, and `back` has each border between
    words of `text`.
    """
    words, found = text.split(), back.split()
    return "".join(words) == "".join(found) and set(accumulate(map(len, words))) <= set(
        accumulate(map(len, found))
    )


# ---- the format of texts that a model was trained with


@dataclass(frozen=True, kw_only=True)
class TextFormat:
    """The format of prompts that a model sees, and the ending of its answers. Exports record it for
    later stages.
    """

    input_template: str | None = None
    chat_template: str | None = None  # a hash of the template that is applied
    ending: str = ""  # the ending of an answer: the end-of-text token, perhaps after a space

    @classmethod
    def of(cls, data: Any, tokenizer: PreTrainedTokenizerBase, *, ending: str = "") -> Self:
        """The format in a section of the flags."""
        if data.apply_chat_template:
            template = hashlib.sha256(tokenizer.get_chat_template().encode()).hexdigest()[:8]
            return cls(chat_template=template, ending=ending)
        template = None if data.input_template == "{}" else data.input_template
        return cls(input_template=template, ending=ending)

    @property
    def flags(self) -> str:
        """The flags that set this format, as they are typed in bash."""
        if self.chat_template:
            return "--data.apply_chat_template"
        return (
            f"--data.input_template ${self.input_template!r}"
            if self.input_template
            else "no template"
        )


def record(tokenizer: PreTrainedTokenizerBase, used: TextFormat | None) -> None:
    """Store the format in the tokenizer, whose files then contain it. None removes an earlier
    format.
    """
    tokenizer.init_kwargs.pop(RECORD, None)
    if used:
        tokenizer.init_kwargs[RECORD] = asdict(used)


def recorded(tokenizer: PreTrainedTokenizerBase) -> TextFormat | None:
    """The format that the model of this tokenizer was trained with, or None if it is unknown."""
    noted: Any = tokenizer.init_kwargs.get(RECORD)
    return TextFormat(**noted) if noted else None


def compare_formats(
    model: str, trained: TextFormat | None, used: TextFormat, prompts: Sequence[str]
) -> list[str]:
    """A notice if the prompts of this run have another format than a model's training prompts.

    `model` is the flag that names the model, with its value.
    """
    if trained is None or (trained.input_template, trained.chat_template) == (
        used.input_template,
        used.chat_template,
    ):
        return []
    if trained.input_template and in_template(trained.input_template, prompts):
        return []  # the rows contain the template already
    both = trained.chat_template and used.chat_template
    other = (
        "another chat template than this run has"
        if both
        else f"{trained.flags}, but this run uses {used.flags}"
    )
    return [f"{model} was trained with {other}: its prompts look different here."]


def in_template(template: str, texts: Sequence[str]) -> bool:
    """Return whether all these texts are already in a template.

    A space at the end of the template may be missing. If the template has words on both sides, a
    text may continue after it.
    """
    before, _, after = template.partition("{}")
    end = after.rstrip(" ")
    if not end.strip():
        return all(text.startswith(before) and text.endswith(after) for text in texts)
    if before.strip():
        return all(text.startswith(before) and end in text[len(before) :] for text in texts)
    return all(text.startswith(before) and text.rstrip(" ").endswith(end) for text in texts)


def unused_chat_template(
    model: str, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, applied: bool
) -> list[str]:
    """Return a notice if a model has a chat template that neither the flags nor the texts use.

    `model` is the flag that names the model, with its value. A model that an earlier stage exported
    records its own format: see `compare_formats`.
    """
    if applied or recorded(tokenizer) or not tokenizer.chat_template:
        return []
    marks = chat_marks(tokenizer)
    if any(mark in text for mark in marks for text in texts):
        return []  # the rows are rendered already
    return [
        f"{model} has a chat template, but this run does not use it: prompts look different from the model's own chats. Pass "
        "--data.apply_chat_template, unless this is a base model that was never trained on chats."
    ]


def glued(prompts: Sequence[str], answers: Sequence[str]) -> list[str]:
    """Return a notice if each of these prompts ends, and each answer begins, with a word, and
    nothing is put between them.
    """
    pairs = [
        (prompt.rstrip(".?!"), answer)
        for prompt, answer in zip(prompts, answers, strict=False)
        if prompt and answer
    ]
    if not pairs or not all(
        prompt[-1:].isalpha() and answer[0].isalnum() for prompt, answer in pairs
    ):
        return []
    example = f"{prompts[0][-20:]}{answers[0][:20]}"
    return [
        f"Nothing separates prompts from answers: the first row is joined as {example!r}. Pass --data.apply_chat_template, or "
        "--data.input_template with {} and a separator."
    ]


def filled_already(used: TextFormat, texts: Sequence[str]) -> list[str]:
    """A notice if texts of the data begin with the words of the template that they are put into."""
    words = (used.input_template or "").partition("{}")[0].strip()
    if not words or not any(text.startswith(words) for text in texts):
        return []
    return [
        f"Some of the first rows begin with {words!r} already, which {used.flags} puts in front once more. If they are "
        "whole prompts, as batch_inference writes them, give --data.input_template {}."
    ]


def joined_border(used: TextFormat, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """A notice if the tokenizer joins a space at the end of the template with the first word of an
    answer.
    """
    template = used.input_template or ""
    end = template.partition("{}")[2]
    alone, joined = tokenizer([end, f"{end}A"], add_special_tokens=False)["input_ids"]
    if not end.endswith(" ") or joined[: len(alone)] == alone:
        return []
    return [
        f"The tokenizer joins the space at the end of {used.flags} with an answer's first word. So a prompt ends in another "
        f"token in generation than in training, and answers may be empty: use --data.input_template ${template[:-1]!r}"
    ]


def check_answer_room(
    lengths: Sequence[int], *, max_len: int, max_new_tokens: int | None
) -> Finding:
    """Check prompt lengths: return a warning if prompts are cut, a failure if no room is left for
    answers.
    """
    whole = Finding(
        check="prompt lengths",
        level=Level.PASS,
        seen=f"All {len(lengths)} prompts leave room for an answer.",
    )
    room = max_len - (max_new_tokens or 1)
    if max_new_tokens:
        long = sum(length > room for length in lengths)
        if not long:
            return whole
        seen = f"{long} of {len(lengths)} prompts keep only their last {room} tokens: the longest has {max(lengths)}."
        fix = f"Raise --data.max_len {max_len}, which counts prompt and answer (--rollout.max_new_tokens {max_new_tokens})."
        return Finding(check="prompt lengths", level=Level.WARNING, seen=seen, fix=fix)
    long = sum(length >= room for length in lengths)
    if not long:
        return whole
    seen = f"{long} of {len(lengths)} prompts leave no room for an answer in --data.max_len {max_len}: the longest has {max(lengths)} tokens."
    fix = "Raise --data.max_len, or set --rollout.max_new_tokens: longer prompts then keep their last tokens."
    return Finding(check="prompt lengths", level=Level.FAILURE, seen=seen, fix=fix)


def dated_template(tokenizer: PreTrainedTokenizerBase) -> Finding:
    """Return a warning if the chat template writes the date."""
    check, question = "date in the chat template", [{"role": "user", "content": ANSWER}]
    if NAME not in str(tokenizer.chat_template):
        return Finding(check=check, level=Level.PASS, seen="The chat template writes no date.")
    try:
        texts = {
            render(tokenizer, question, variables=clock_at(moment))
            for moment in ("2001-02-03", "2014-05-16")
        }
    except ValueError:  # a template that needs more, a system message for instance
        texts = set[str]()
    if len(texts) == 1:
        return Finding(
            check=check,
            level=Level.PASS,
            seen="The chat template writes no date before a user's message.",
        )
    day = (vars(tokenizer).get(MOMENT) or now()).partition("T")[0]
    return Finding(
        check=check,
        level=Level.WARNING,
        seen=f"The chat template writes the date ({NAME}): this run renders every row with {day}, the day of its first start. "
        "A run or an engine on another day writes a different date.",
        fix="To use one date everywhere, write it into the template as text: with --data.tokenizer_chat_template in "
        "offline training, otherwise in chat_template.jinja in the model's folder.",
    )


# ---- the end of an answer


def ending_of(rows: Sequence[list[int]], tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the ending of most of these training rows: end-of-text, perhaps after a space, or
    another end of generation.

    Returns "" if no row ends so.
    """
    eos, ends = str(tokenizer.eos_token), Ends.of(tokenizer)
    last = [tokens[-1] for tokens in rows]
    others = [
        text
        for text, number in zip(ends.texts[1:], ends.ids[1:], strict=True)
        if 2 * last.count(number) > len(rows)
    ]
    if others:
        return others[0]
    before = [
        tokenizer.decode(tokens[-2:-1]) for tokens in rows if tokens[-1] == tokenizer.eos_token_id
    ]
    if not before:
        return ""
    return f" {eos}" if 2 * sum(text in ("", " ") for text in before) > len(rows) else eos


def end_notices(ending: str, tokenizer: PreTrainedTokenizerBase, answers: str) -> list[str]:
    """A notice about a suspicious ending. `answers` describes the texts that have the ending."""
    eos = tokenizer.eos_token
    if not ending:
        return [
            f"None of the first rows ends with {eos}: the model will not learn to end its answers."
        ]
    spaced = (
        f"{answers} end with an added space before {eos}. A reward that requires an exact match will see the space. To "
        "train without it, pass --data.no_space_before_eos."
    )
    return [spaced] if ending.startswith(" ") else []


def chat_end(tokenizer: PreTrainedTokenizerBase, stops: Collection[str]) -> list[str]:
    """A notice if the chat template ends an answer with a token that does not end generation."""
    asked, answer = (
        {"role": "user", "content": "(a question)"},
        {"role": "assistant", "content": ANSWER},
    )
    try:
        after = render(tokenizer, [asked, answer]).partition(ANSWER)[2]
    except ValueError:  # a template that needs more, a system message for instance
        return []
    if any(stop in after for stop in stops):
        return []
    return [
        f"The chat template ends an answer with {after!r}, but generation ends at {', '.join(sorted(stops))}: "
        f"add --rollout.stop {after.strip()!r}."
    ]
