"""Settings that are fixed when a run is first started and reused when it is resumed.

This module imports only the standard library.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

# Keys of the entries stored next to a run's identity.
MOMENT = "first start"
TRAINED_FORMAT = "trained format"


def now() -> str:
    """Return the current time in ISO format, to the second."""
    return datetime.now().isoformat(timespec="seconds")


@dataclass(frozen=True, kw_only=True)
class FirstStart:
    """Settings fixed when a run is first started.

    Older releases stored neither entry and had no default text format. Runs started by those
    releases are resumed without the default.
    """

    moment: str  # when the run was first started; chat templates insert its date
    trained_format: bool  # true if texts default to the format the model was trained on

    @classmethod
    def here(cls) -> Self:
        """Return the settings for a run that is first started now."""
        return cls(moment=now(), trained_format=True)

    @classmethod
    def of(cls, entries: Mapping[str, Any]) -> Self:
        """Return the settings of the run that wrote these entries."""
        return cls(
            moment=entries.get(MOMENT) or now(), trained_format=bool(entries.get(TRAINED_FORMAT))
        )

    @property
    def entries(self) -> dict[str, Any]:
        """Return the entries from which `of` restores the settings."""
        return {MOMENT: self.moment, TRAINED_FORMAT: self.trained_format}
