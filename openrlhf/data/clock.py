"""The date that a chat template writes.

It is the date of the run's first start, even if the run is resumed on another day.
"""

from datetime import datetime
from typing import Any

from transformers import PreTrainedTokenizerBase

NAME = "strftime_now"  # the function of Transformers that a template calls
MOMENT = "rendered_at"  # an attribute of the tokenizer, which its files do not contain


def set_clock(tokenizer: PreTrainedTokenizerBase, moment: str) -> None:
    """Let the chat template of `tokenizer` write the date of `moment`."""
    if NAME in str(tokenizer.chat_template):
        setattr(tokenizer, MOMENT, moment)


def clock_at(moment: str) -> dict[str, Any]:
    """Return the variables of a template that stop its clock at a moment."""
    return {NAME: datetime.fromisoformat(moment).strftime}


def clock_of(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the variables of a template that stop its clock; none if the clock runs."""
    moment: Any = vars(tokenizer).get(MOMENT)
    if not moment:
        return {}
    return clock_at(moment)
