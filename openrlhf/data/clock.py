"""The date that chat templates insert: the date on which the run was first started.

The date stays the same if the run is resumed on a later day.
"""

from datetime import datetime
from typing import Any

from transformers import PreTrainedTokenizerBase

NAME = "strftime_now"  # the Transformers function that a template calls to insert the date
MOMENT = "rendered_at"  # name of a tokenizer attribute that is not saved to disk


def set_clock(tokenizer: PreTrainedTokenizerBase, moment: str) -> None:
    """Make the tokenizer's chat template insert the date of `moment`."""
    if NAME in str(tokenizer.chat_template):
        setattr(tokenizer, MOMENT, moment)


def clock_at(moment: str) -> dict[str, Any]:
    """Return the template variables that set the date to `moment`."""
    return {NAME: datetime.fromisoformat(moment).strftime}


def clock_of(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the template variables that set this tokenizer's fixed date, or {} if it has none."""
    moment: Any = vars(tokenizer).get(MOMENT)
    if not moment:
        return {}
    return clock_at(moment)
