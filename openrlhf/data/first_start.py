"""Settings that a run's first start fixes for its later starts, and their format in files.

This module needs only the standard library.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

# Entries stored next to an identity.
MOMENT = "first start"
TRAINED_FORMAT = "trained format"


def now() -> str:
    """Return the current time as text, to the second."""
    return datetime.now().isoformat(timespec="seconds")


@dataclass(frozen=True, kw_only=True)
class FirstStart:
    """The settings of a run's first start.

    Older releases had no default format and stored neither entry. A run started by an older release
    continues without the default.
    """

    moment: str  # a chat template writes its date
    trained_format: bool  # by default, texts have the format of the model's training

    @classmethod
    def here(cls) -> Self:
        """Return the first start of a run that starts now."""
        return cls(moment=now(), trained_format=True)

    @classmethod
    def of(cls, entries: Mapping[str, Any]) -> Self:
        """Return the first start of a run that wrote these entries."""
        return cls(
            moment=entries.get(MOMENT) or now(), trained_format=bool(entries.get(TRAINED_FORMAT))
        )

    @property
    def entries(self) -> dict[str, Any]:
        """Return the entries that `of` reads."""
        return {MOMENT: self.moment, TRAINED_FORMAT: self.trained_format}
