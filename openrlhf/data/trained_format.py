"""The text format of a model's training, as the default of flags that the user does not set.

An export records the format of its training texts (`first_look.TextFormat`). A later command that
names no template builds its texts in the same way.
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
    """Return the section `data` with the format of the model's training, where no flag sets one.

    Prints a notice about it. `column` contains the prompts of `rows`; None if no prompts are put
    into a template. `model` is the flag that names the model, with its value. `generates`: the
    model continues where the template ends. Prompts that already have the format are unchanged.
    """
    trained = recorded(tokenizer)
    if trained is None:
        return data
    if generates and joined_border(trained, tokenizer):
        # Answers begin with the space.
        trained = replace(trained, input_template=str(trained.input_template)[:-1])
    changes: dict[str, Any] = {}
    opposites: list[str] = []
    if follows_template(config, data, trained, tokenizer, prompts_in(rows, column)):
        changes = {
            "input_template": trained.input_template,
            "apply_chat_template": bool(trained.chat_template),
        }
        opposites.append("--data.input_template {}")
    if follows_ending(config, data, trained, tokenizer):
        changes["space_before_eos"] = False
        opposites.append("--data.space_before_eos")
    changed = {name: value for name, value in changes.items() if getattr(data, name) != value}
    if not changed:
        return data
    typed: list[str] = []
    if {"input_template", "apply_chat_template"} & changed.keys():
        typed.append(trained.flags)
    if "space_before_eos" in changed:
        typed.append("--data.no_space_before_eos")
    notice(
        f"{model} was trained with {' '.join(typed)}, so this run uses that too. "
        f"For its own default, pass {' '.join(opposites)}."
    )
    return replace(data, **changed)


def prompts_in(rows: Table, column: str | None) -> list[Any]:
    """Return a column's values in the first rows; none if the column does not exist."""
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
    """Return whether prompts get the template that the model was trained with.

    They do not if a flag or the layout of the rows names another template, or if the prompts
    already have the template.
    """
    if TEMPLATE in config.given or CHAT in config.given or data.apply_chat_template:
        return False
    if not prompts or CHAT in unused_flags(config):
        return False
    if trained.chat_template and not tokenizer.chat_template:
        return False
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if trained.input_template and len(texts) < len(prompts):
        return False
    if not trained.chat_template and not trained.input_template:
        return False
    return not has_format(trained, tokenizer, texts)


def follows_ending(
    config: Any, data: Any, trained: TextFormat, tokenizer: PreTrainedTokenizerBase
) -> bool:
    """Return whether end-of-text is added without a space, as in the model's training."""
    if "space_before_eos" not in vars(data) or SPACE in config.given:
        return False
    if trained.ending != tokenizer.eos_token:
        return False
    return SPACE not in unused_flags(config)


def has_format(
    trained: TextFormat, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]
) -> bool:
    """Return whether all these texts already have a format; False without texts."""
    if not texts:
        return False
    if trained.chat_template:
        _, _, after = rendered_question(tokenizer).partition(ANSWER)
        header = after.strip()  # the header of the assistant's turn
        marks = [header] if header else chat_marks(tokenizer)
        if not marks:
            return False
        for text in texts:
            if not all(mark in text for mark in marks):
                return False
        return True
    return bool(trained.input_template) and in_template(trained.input_template or "", texts)


def kept_format(
    used: TextFormat, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]
) -> TextFormat:
    """Return the format to record.

    It is `used`, with the template of the model's training if these prompts have that template.
    `texts` are prompts as the model reads them. A space at the end of a template is ignored.
    """
    trained = recorded(tokenizer)
    if trained is None or used.chat_template:
        return used
    template = (trained.input_template or "").rstrip(" ")
    same = template != "" and (used.input_template or "").rstrip(" ") == template
    if not same and not has_format(trained, tokenizer, texts):
        return used
    return replace(used, input_template=trained.input_template, chat_template=trained.chat_template)
