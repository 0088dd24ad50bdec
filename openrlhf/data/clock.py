"""The date that a chat template writes: the date of the run's first start.

The date does not change if the run is resumed on another day.
"""

from datetime import datetime
from typing import Any

from transformers import PreTrainedTokenizerBase

NAME = "strftime_now"  # the function of Transformers that a template calls
MOMENT = "rendered_at"  # an attribute of the tokenizer that is not saved to its files


def set_clock(tokenizer: PreTrainedTokenizerBase, moment: str) -> None:
    """Make the chat template of `tokenizer` write the date of `moment`."""
    if NAME in str(tokenizer.chat_template):
        setattr(tokenizer, MOMENT, moment)


def clock_at(moment: str) -> dict[str, Any]:
    """Return the template variables that fix the date at `moment`."""
    return {NAME: datetime.fromisoformat(moment).strftime}


def clock_of(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the template variables that fix this tokenizer's date; none if it is not fixed."""
    moment: Any = vars(tokenizer).get(MOMENT)
    if not moment:
        return {}
    return clock_at(moment)
