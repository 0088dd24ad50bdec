"""The first texts of a run as the model will see them, for --dry_run: tokens, and what is learned
of them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import groupby

from transformers import PreTrainedTokenizerBase

from openrlhf.batches import PER_SAMPLE, Ragged, Steps, TokenRows
from openrlhf.data.first_look import recorded

SHOWN = 2  # rows
LONGEST = 2000  # characters of a part of a text; the middle of a longer part is left out
AT_ENDS = 6  # token ids of either end


def show_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """The format of the prompts, which the first look has recorded."""
    used = recorded(tokenizer)
    return f"Template: {used.flags if used else 'none, the texts are those of the rows'}."


def show_batch(
    batch: Ragged, tokenizer: PreTrainedTokenizerBase, names: Sequence[str]
) -> Iterator[str]:
    """Each sample with its targets: the tokens of the loss, labelled steps, or the last token,
    where a reward is read.

    `names`: of the samples of a row; samples without a name are left out.
    """
    columns = {
        f.name: getattr(batch, f.name)
        for f in fields(batch)
        if f.metadata.get("role") == PER_SAMPLE
    }
    for sample, (start, end) in enumerate(
        zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True)
    ):
        row, place = divmod(sample, len(names))
        about = [
            f"{name} {column[sample]:g}" for name, column in columns.items() if column is not None
        ]
        marks: list[str | None] = [None] * (end - start - 1) + [""]
        if isinstance(batch, TokenRows):
            marks = ["" if target else None for target in batch.loss_mask[start:end].tolist()]
        if isinstance(batch, Steps):
            marks = [_label(value, tokenizer) for value in batch.labels[start:end].tolist()]
        if names[place]:
            title = ", ".join([f"{names[place]} {row + 1}", *about])
            yield show_text(title, batch.tokens[start:end].tolist(), tokenizer, marks)


def _label(label: float, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """A probability, or the token that is the label; None for NaN."""
    return (
        f" = {label:g}"
        if 0 <= label <= 1
        else f" = {tokenizer.decode([int(label)])}"
        if label > 1
        else None
    )


def show_text(
    title: str,
    tokens: list[int],
    tokenizer: PreTrainedTokenizerBase,
    marks: Sequence[str | None] = (),
) -> str:
    """Number of tokens and targets, first and last ids, and the text with its ⟦targets⟧: tokens
    whose mark is not None.
    """
    ids, targets = (
        [*map(str, tokens)],
        f"{sum(mark is not None for mark in marks)} targets, " if marks else "",
    )
    ends = ids if len(ids) <= 2 * AT_ENDS else [*ids[:AT_ENDS], "…", *ids[-AT_ENDS:]]
    text, before, end = "", "", 0
    for mark, run in groupby(marks or [None] * len(tokens)):
        end += len(list(run))
        # The text up to here, less the text before: tokenizers write the first token of a text in
        # another way.
        until = str(tokenizer.decode(tokens[:end], clean_up_tokenization_spaces=False))
        part, before = until[len(before) :], until
        part = f"{part[: LONGEST // 2]} … {part[-LONGEST // 2 :]}" if len(part) > LONGEST else part
        text += part if mark is None else f"⟦{part}{mark}⟧"
    return f"--- {title}: {len(tokens)} tokens, {targets}ids {' '.join(ends)}\n{text}"
