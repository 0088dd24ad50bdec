"""Shows a run's first texts as the model sees them (tokens and targets), for --dry_run."""

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise

from transformers import PreTrainedTokenizerBase

from openrlhf.core.batches import PER_ROW, Ragged, Steps, TokenRows
from openrlhf.data.first_look import recorded

SHOWN = 2  # rows
# Maximum number of characters to show per section of text. The middle of a longer section is
# elided.
LONGEST = 2000
AT_ENDS = 6  # number of token ids shown from each end


def show_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a line with the prompt format that `first_look` has recorded."""
    used = recorded(tokenizer)
    if used is None:
        return "Template: none; texts are used unchanged."
    return f"Template: {used.flags}."


def show_batch(
    batch: Ragged, tokenizer: PreTrainedTokenizerBase, names: Sequence[str]
) -> Iterator[str]:
    """Yield each sample as text with its targets marked.

    Targets are the tokens in the loss, the labelled steps, or the last token, at which the reward
    is read. `names` labels the samples of a row; samples without a name are skipped.
    """
    columns = [column for column in batch.present_columns() if column.role == PER_ROW]
    for sample, (start, end) in enumerate(pairwise(batch.offsets.tolist())):
        row, place = divmod(sample, len(names))
        if not names[place]:
            continue
        title = f"{names[place]} {row + 1}"
        for column in columns:
            title += f", {column.name} {column.values[sample]:g}"
        marks = _marks(batch, start, end, tokenizer)
        yield show_text(title, batch.tokens[start:end].tolist(), tokenizer, marks)


def _marks(
    batch: Ragged, start: int, end: int, tokenizer: PreTrainedTokenizerBase
) -> list[str | None]:
    """Return a mark for each token in a sample: the text shown after a target, or None."""
    if isinstance(batch, TokenRows):
        return ["" if target else None for target in batch.loss_mask[start:end].tolist()]
    marks: list[str | None] = [None] * (end - start)
    if not isinstance(batch, Steps):
        marks[-1] = ""
        return marks
    for place, label in enumerate(batch.labels[start:end].tolist()):
        if label > 1:
            marks[place] = f" = {tokenizer.decode([int(label)])}"
        elif label >= 0:  # a probability; a NaN label fails this comparison
            marks[place] = f" = {label:g}"
    return marks


def show_text(
    title: str,
    tokens: list[int],
    tokenizer: PreTrainedTokenizerBase,
    marks: Sequence[str | None] = (),
) -> str:
    """Return the text, its numbers of tokens and targets, and its first and last token ids.

    Tokens whose mark is not None are targets, shown as ⟦target⟧.
    """
    counts = f"{len(tokens)} tokens"
    if marks:
        counts += f", {len(marks) - list(marks).count(None)} targets"
    ids = list(map(str, tokens))
    if len(ids) > 2 * AT_ENDS:
        ids = [*ids[:AT_ENDS], "…", *ids[-AT_ENDS:]]
    text = ""
    before = ""
    end = 0
    for mark, run in groupby(marks or [None] * len(tokens)):
        end += len(list(run))
        # Decode from the start, because tokenizers decode a text's first token differently.
        until = str(tokenizer.decode(tokens[:end], clean_up_tokenization_spaces=False))
        part = until[len(before) :]
        before = until
        if len(part) > LONGEST:
            part = f"{part[: LONGEST // 2]} … {part[-LONGEST // 2 :]}"
        text += part if mark is None else f"⟦{part}{mark}⟧"
    return f"--- {title}: {counts}, ids {' '.join(ids)}\n{text}"
