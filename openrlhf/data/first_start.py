"""Settings that a run's first start fixes for its later starts, and how files store them. Standard
library only.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

MOMENT, TRAINED_FORMAT = "first start", "trained format"  # entries beside an identity


def now() -> str:
    """Return the present moment, to the second, as text."""
    return datetime.now().isoformat(timespec="seconds")


@dataclass(frozen=True, kw_only=True)
class FirstStart:
    """The moment whose date a chat template writes, and whether texts have the format of the
    model's training by default.

    Older releases had no such default, and kept neither entry: a run that they began continues
    without it.
    """

    moment: str
    trained_format: bool

    @classmethod
    def here(cls) -> Self:
        """Return the first start of a run that begins now."""
        return cls(moment=now(), trained_format=True)

    @classmethod
    def of(cls, entries: Mapping[str, Any]) -> Self:
        """Return the first start of a run that wrote these entries."""
        return cls(
            moment=entries.get(MOMENT) or now(), trained_format=bool(entries.get(TRAINED_FORMAT))
        )

    @property
    def entries(self) -> dict[str, Any]:
        """The entries that `of` reads."""
        return {MOMENT: self.moment, TRAINED_FORMAT: self.trained_format}
