"""The text format a model was trained on, used as the default for unset flags.

Exported models record their text format (`first_look.TextFormat`). Later commands use the recorded
format unless a flag sets a template.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from openrlhf.config.effects import unused_flags
from openrlhf.data.first_look import TextFormat, in_template, joined_border, recorded
from openrlhf.data.layouts import FIRST_ROWS
from openrlhf.data.loading import Table
from openrlhf.data.templates import ANSWER, chat_marks, rendered_question
from openrlhf.reporting import notice

# Flags.
TEMPLATE = "data.input_template"
CHAT = "data.apply_chat_template"
SPACE = "data.space_before_eos"


def with_trained_format(
    config: Any,
    data: Any,
    tokenizer: PreTrainedTokenizerBase,
    rows: Table,
    *,
    column: str | None,
    model: str,
    generates: bool = False,
) -> Any:
    """Return the `data` section with the model's recorded format, unless flags set a format.

    Prints a notice if the section changes. `column` is the prompt column in `rows`, or None if
    prompts are not put into a template. `model` is the flag that names the model, with its value.
    With `generates`, the model continues where the template ends. Prompts already in the format are
    left unchanged.
    """
    trained = recorded(tokenizer)
    if trained is None:
        return data
    if generates and joined_border(trained, tokenizer):
        # The model generates the leading space as part of its answer.
        trained = replace(trained, input_template=str(trained.input_template)[:-1])
    changes: dict[str, Any] = {}
    used = ""
    default = ""
    if follows_template(config, data, trained, tokenizer, prompts_in(rows, column)):
        changes["input_template"] = trained.input_template
        changes["apply_chat_template"] = bool(trained.chat_template)
        if replace(data, **changes) != data:
            used += f" {trained.flags}"
            default += " --data.input_template {}"
    if follows_ending(config, data, trained, tokenizer) and data.space_before_eos:
        changes["space_before_eos"] = False
        used += " --data.no_space_before_eos"
        default += " --data.space_before_eos"
    if used:
        notice(
            f"{model} was trained with{used}, so this run uses that too. "
            f"To use the command's default instead, pass{default}."
        )
    return replace(data, **changes)


def prompts_in(rows: Table, column: str | None) -> list[Any]:
    """Return a column's values in the first rows, or [] if the column does not exist."""
    if not column:
        return []
    return list(rows[:FIRST_ROWS].get(column, []))


def follows_template(
    config: Any,
    data: Any,
    trained: TextFormat,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Any],
) -> bool:
    """Return whether to apply the template that the model was trained with.

    The template is not applied if a flag or the dataset layout sets another one, or if the prompts
    already contain it.
    """
    if TEMPLATE in config.given or CHAT in config.given or data.apply_chat_template:
        return False
    if not prompts or CHAT in unused_flags(config):
        return False
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if trained.chat_template:
        is_possible = bool(tokenizer.chat_template)
    else:
        is_possible = bool(trained.input_template) and len(texts) == len(prompts)
    return is_possible and not has_format(trained, tokenizer, texts)


def follows_ending(
    config: Any, data: Any, trained: TextFormat, tokenizer: PreTrainedTokenizerBase
) -> bool:
    """Return whether to append end-of-text without a space, as during the model's training."""
    if "space_before_eos" not in vars(data) or SPACE in config.given:
        return False
    if trained.ending != tokenizer.eos_token:
        return False
    return SPACE not in unused_flags(config)


def has_format(
    trained: TextFormat, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]
) -> bool:
    """Return whether all of these texts are already in a format; False if there are no texts."""
    if not texts:
        return False
    if trained.chat_template:
        _, _, after = rendered_question(tokenizer).partition(ANSWER)
        header = after.strip()  # header of the assistant turn
        marks = [header] if header else chat_marks(tokenizer)
        return bool(marks) and all(all(map(text.__contains__, marks)) for text in texts)
    return bool(trained.input_template) and in_template(trained.input_template or "", texts)


def kept_format(
    used: TextFormat, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]
) -> TextFormat:
    """Return the format to record in an export.

    The result is `used` or, if the prompts are already in the format that the model was trained
    on, that format. `texts` are prompts as the model sees them. A template's trailing space is
    ignored.
    """
    trained = recorded(tokenizer)
    if trained is None or used.chat_template:
        return used
    template = (trained.input_template or "").rstrip(" ")
    same = template != "" and (used.input_template or "").rstrip(" ") == template
    if not same and not has_format(trained, tokenizer, texts):
        return used
    return replace(used, input_template=trained.input_template, chat_template=trained.chat_template)
