"""Checks on a run's first rows, before any model is loaded.

A definite mistake raises DataError, and a likely mistake is returned as a notice. Apart from
raising errors, the functions have no side effects.
"""

import hashlib
import re
import unicodedata
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any, Self

from transformers import PreTrainedTokenizerBase

from openrlhf.checks import Finding
from openrlhf.data.clock import MOMENT, NAME, clock_at
from openrlhf.data.errors import DataError
from openrlhf.data.first_start import now
from openrlhf.data.layouts import FIRST_ROWS
from openrlhf.data.loading import Table
from openrlhf.data.messages import texts_in
from openrlhf.data.templates import ANSWER, chat_marks, render
from openrlhf.data.tokenizer import Ends, any_of

# An entry in tokenizer_config.json, which is copied along with the model.
RECORD = "openrlhf_format"


# ---- the tokenizer


def texts_of(rows: Table, columns: Collection[str]) -> list[str]:
    """Return the text in these columns of the first rows: string values and message contents."""
    first = rows[:FIRST_ROWS]
    texts: list[str] = []
    for column in columns:
        for value in first.get(column, []):
            texts += texts_in(value)
    return texts


def round_trip(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, prompts: bool = False
) -> list[Finding]:
    """Check whether texts survive encoding and decoding, and return a notice if they change.

    Unicode normalization, added spaces, spaces next to special tokens, and collapsed whitespace are
    harmless. Lost case or accents and unknown tokens produce a notice. With `prompts`, any other
    change produces a notice too, because the query passed to a reward is decoded from tokens.
    Raises DataError for any other lost character, a lost word boundary, or more unknown tokens than
    known ones.
    """
    if not texts:
        return []
    changes: list[Finding] = []
    tokens = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
    for text, ids in zip(texts, tokens, strict=True):
        decoded = tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        back = str(decoded)
        if back == text:
            continue
        before = _spaced(tokenizer, text)
        after = _spaced(tokenizer, back)
        change = f"{text[:200]!r} decodes to {back[:200]!r}."
        if _survives(before, after):
            seen = (
                f"{change} A reward function that strips the prompt from a query by length, "
                "query[len(prompt):], cuts it at the wrong position."
            )
            if prompts:
                changes = [Finding(seen)]
            continue
        problem = f"The tokenizer of {tokenizer.name_or_path!r} changes the data: {change}"
        unknown = ids.count(tokenizer.unk_token_id)
        if _survives(_without_case(before), _without_case(after)):
            return [Finding(f"{problem} The model cannot distinguish case or accents.")]
        if 0 < unknown <= len(ids) / 2:
            return [Finding(f"{problem} {unknown} of {len(ids)} tokens are unknown.")]
        raise DataError(
            f"{problem} Text is lost. Check the tokenizer's files, or use the model's original "
            "tokenizer."
        )
    return changes


def _spaced(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """Return a text in Unicode compatibility form (NFKC), with spaces around special tokens."""
    spaced = any_of(tokenizer.all_special_tokens).sub(r" \g<0> ", text)
    return unicodedata.normalize("NFKC", spaced)


def _without_case(text: str) -> str:
    """Return a text with case and accents removed."""
    letters = unicodedata.normalize("NFKD", text.casefold())
    return "".join(letter for letter in letters if not unicodedata.combining(letter))


def _survives(text: str, back: str) -> bool:
    """Return whether `back` has all characters and word boundaries of `text`.

    Any other whitespace is ignored.
    """
    words = text.split()
    found = back.split()
    if "".join(words) != "".join(found):
        return False
    borders = set(accumulate(map(len, words)))
    return borders <= set(accumulate(map(len, found)))


# ---- the text format that a model was trained with


@dataclass(frozen=True, kw_only=True)
class TextFormat:
    """The format of a model's prompts and answers.

    Exported models record the format for later training stages.
    """

    input_template: str | None = None
    chat_template: str | None = None  # hash of the applied template
    ending: str = ""  # the end of every answer: the end-of-text token, possibly after a space

    @classmethod
    def of(cls, data: Any, tokenizer: PreTrainedTokenizerBase, *, ending: str = "") -> Self:
        """Return the format that a config section selects."""
        if data.apply_chat_template:
            template = hashlib.sha256(tokenizer.get_chat_template().encode()).hexdigest()[:8]
            return cls(chat_template=template, ending=ending)
        template = None if data.input_template == "{}" else data.input_template
        return cls(input_template=template, ending=ending)

    @property
    def flags(self) -> str:
        """The flags that select this format, as typed in bash."""
        if self.chat_template:
            return "--data.apply_chat_template"
        if self.input_template:
            return f"--data.input_template ${self.input_template!r}"
        return "no template"


def record(tokenizer: PreTrainedTokenizerBase, used: TextFormat | None) -> None:
    """Store the format in the tokenizer, to be saved with its files.

    None removes an earlier format.
    """
    tokenizer.init_kwargs.pop(RECORD, None)
    if used:
        tokenizer.init_kwargs[RECORD] = asdict(used)


def recorded(tokenizer: PreTrainedTokenizerBase) -> TextFormat | None:
    """Return the format that the tokenizer's model was trained with, or None if unknown."""
    entries: Any = tokenizer.init_kwargs.get(RECORD)
    if not entries:
        return None
    return TextFormat(**entries)


def compare_formats(
    model: str, trained: TextFormat | None, used: TextFormat, prompts: Sequence[str]
) -> list[Finding]:
    """Return a notice if this run's prompt format differs from the one the model was trained with.

    `model` is the flag that names the model, with its value.
    """
    if trained is None:
        return []
    if replace(trained, ending=used.ending) == used:
        return []
    if trained.input_template and in_template(trained.input_template, prompts):
        return []  # the rows already contain the template
    if trained.chat_template and used.chat_template:
        difference = "a different chat template from this run's"
    else:
        difference = f"{trained.flags}, but this run uses {used.flags}"
    seen = f"{model} was trained with {difference}, so its training prompts looked different."
    return [Finding(seen)]


def in_template(template: str, texts: Sequence[str]) -> bool:
    """Return whether a template has already been applied to all of these texts.

    The template's trailing space may be missing. If the template has words before and after the
    text, a row may continue after the template.
    """
    before, _, after = template.partition("{}")
    end = after.rstrip(" ")
    if not end.strip():
        ending = re.escape(after)
    elif before.strip():
        ending = re.escape(end) + ".*"
    else:
        ending = re.escape(end) + " *"
    pattern = re.compile(f"{re.escape(before)}.*{ending}", re.DOTALL)
    return all(map(pattern.fullmatch, texts))


def unused_chat_template(
    model: str, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, applied: bool
) -> list[Finding]:
    """Return a notice if a model has a chat template that neither the flags nor the texts use.

    `model` is the flag that names the model, with its value. Exported models record their format
    and are checked by `compare_formats` instead.
    """
    if applied or recorded(tokenizer) or not tokenizer.chat_template:
        return []
    marks = chat_marks(tokenizer)
    for text in texts:
        if any(mark in text for mark in marks):
            return []  # the rows are already rendered
    seen = (
        f"{model} has a chat template that this run does not use, so prompts look different from "
        "the chats it was trained on."
    )
    fix = "Pass --data.apply_chat_template, unless this is a base model not trained on chats."
    return [Finding(seen, fix)]


def glued(prompts: Sequence[str], answers: Sequence[str]) -> list[Finding]:
    """Return a notice if every prompt ends with a word and every answer begins with one.

    Concatenating a prompt and its answer would merge the two words.
    """
    pairs = [pair for pair in zip(prompts, answers, strict=False) if all(pair)]
    for prompt, answer in pairs:
        if not prompt.rstrip(".?!")[-1:].isalpha() or not answer[0].isalnum():
            return []
    if not pairs:
        return []
    example = f"{pairs[0][0][-20:]}{pairs[0][1][:20]}"
    seen = f"Nothing separates prompts from answers: the first row becomes {example!r}."
    fix = "Pass --data.apply_chat_template, or --data.input_template with {} and a separator."
    return [Finding(seen, fix)]


def filled_already(used: TextFormat, texts: Sequence[str]) -> list[Finding]:
    """Return a notice if texts already begin with the template's opening words."""
    words = (used.input_template or "").partition("{}")[0].strip()
    if not words or not any(text.startswith(words) for text in texts):
        return []
    seen = f"Some of the first rows begin with {words!r}, and {used.flags} adds it again."
    fix = (
        "If the rows are complete prompts, as batch_inference writes them, pass "
        "--data.input_template {}."
    )
    return [Finding(seen, fix)]


def joined_border(used: TextFormat, tokenizer: PreTrainedTokenizerBase) -> list[Finding]:
    """Return a notice if the tokenizer merges the template's last space with the answer."""
    template = used.input_template or ""
    end = template.partition("{}")[2]
    alone, joined = tokenizer([end, f"{end}A"], add_special_tokens=False)["input_ids"]
    if not end.endswith(" ") or joined[: len(alone)] == alone:
        return []
    seen = (
        f"The tokenizer merges the trailing space of {used.flags} with an answer's first word. "
        "Prompts then end in different tokens in training and generation, and answers may be empty."
    )
    return [Finding(seen, f"Use --data.input_template ${template[:-1]!r}")]


def check_answer_room(
    lengths: Sequence[int], *, max_len: int, max_new_tokens: int | None
) -> list[Finding]:
    """Return a notice if prompts are truncated, or a failure if no room is left for an answer."""
    room = max_new_tokens or 2  # an answer needs at least one token and an end token
    longest = max_len - room
    cut = sum(length > longest for length in lengths)
    if not cut:
        return []
    seen = (
        f"{cut} of {len(lengths)} prompts leave no room for an answer in --data.max_len {max_len}, "
        f"which limits prompt plus answer: the longest has {max(lengths)} tokens."
    )
    fix = "Raise --data.max_len, or set --rollout.max_new_tokens to truncate long prompts."
    if max_new_tokens:
        seen += f" They are truncated to their last {longest} tokens."
        fix = f"Raise --data.max_len, or lower --rollout.max_new_tokens {max_new_tokens}."
    return [Finding(seen, fix, fails=not max_new_tokens)]


def dated_template(tokenizer: PreTrainedTokenizerBase) -> list[Finding]:
    """Return a notice if the chat template inserts the date."""
    question = [{"role": "user", "content": ANSWER}]
    if NAME not in str(tokenizer.chat_template):
        return []
    with suppress(ValueError):  # the template may require more, e.g. a system message
        one_day = render(tokenizer, question, variables=clock_at("2001-02-03"))
        if one_day == render(tokenizer, question, variables=clock_at("2014-05-16")):
            return []
    moment: str = vars(tokenizer).get(MOMENT) or now()
    seen = (
        f"The chat template inserts the date ({NAME}). This run renders every row with "
        f"{moment.partition('T')[0]}, the day on which the run was first started. A run or an "
        "engine started on another day uses a different date."
    )
    fix = (
        "To use the same date everywhere, hard-code it in the template: "
        "--data.tokenizer_chat_template in offline training, otherwise chat_template.jinja in the "
        "model's folder."
    )
    return [Finding(seen, fix)]


# ---- how answers end


def ending_of(rows: Sequence[list[int]], tokenizer: PreTrainedTokenizerBase) -> str:
    """Return how most of these training rows end, or "" if they have no common ending.

    An ending is end-of-text (with or without a space before it) or another stop token.
    """
    eos = str(tokenizer.eos_token)
    ends = Ends.of(tokenizer)
    last = [tokens[-1] for tokens in rows]
    for text, number in zip(ends.texts[1:], ends.ids[1:], strict=True):
        if 2 * last.count(number) > len(rows):
            return text
    if tokenizer.eos_token_id not in last:
        return ""
    spaced = 0
    for tokens in rows:
        if tokens[-1] == tokenizer.eos_token_id and tokenizer.decode(tokens[-2:-1]) in ("", " "):
            spaced += 1
    if 2 * spaced > len(rows):
        return f" {eos}"
    return eos


def check_ending(ending: str, tokenizer: PreTrainedTokenizerBase, answers: str) -> list[Finding]:
    """Return a notice if texts end in a suspicious way. `answers` describes the texts."""
    eos = tokenizer.eos_token
    if not ending:
        seen = (
            f"None of the first rows ends with {eos}, so the model will not learn to end its "
            "answers."
        )
        return [Finding(seen)]
    if not ending.startswith(" "):
        return []
    seen = (
        f"{answers} end with an added space before {eos}. A reward that requires an exact match "
        "sees this space."
    )
    return [Finding(seen, "To train without it, pass --data.no_space_before_eos.")]


def chat_end(tokenizer: PreTrainedTokenizerBase, stops: Collection[str]) -> list[Finding]:
    """Return a notice if the chat template's end-of-turn text does not stop generation.

    `stops` are the texts that stop generation.
    """
    question = {"role": "user", "content": "(a question)"}
    answer = {"role": "assistant", "content": ANSWER}
    try:
        after = render(tokenizer, [question, answer]).partition(ANSWER)[2]
    except ValueError:  # the template may require more, e.g. a system message
        return []
    if any(stop in after for stop in stops):
        return []
    seen = (
        f"The chat template ends an answer with {after!r}, but generation stops at "
        f"{', '.join(sorted(stops))}."
    )
    fix = "Add an end-of-turn text to the template."
    if after:
        fix = f"Add --rollout.stop ${after.strip() or after!r}."
    return [Finding(seen, fix)]
