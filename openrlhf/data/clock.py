"""The date that a chat template writes: of a run's first start, also if the run is resumed on another day."""

from datetime import datetime
from typing import Any

from transformers import PreTrainedTokenizerBase

NAME = "strftime_now"  # the function of Transformers that a template calls
MOMENT = "rendered_at"  # an attribute of the tokenizer, which its files do not contain


def set_clock(tokenizer: PreTrainedTokenizerBase, moment: str) -> list[str]:
    """Let the chat template of `tokenizer` write the date of `moment`. Returns a notice if the template writes a date."""
    if NAME not in str(tokenizer.chat_template):
        return []
    setattr(tokenizer, MOMENT, moment)
    day = moment.partition("T")[0]
    return [
        f"The chat template writes the date ({NAME}): this run renders every row with {day}, the day of its first start. Runs "
        "and engines of another day read another date."
    ]


def clock_of(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the variables of a template that stop its clock; none if the clock runs."""
    moment: Any = vars(tokenizer).get(MOMENT)
    return {NAME: datetime.fromisoformat(moment).strftime} if moment else {}
