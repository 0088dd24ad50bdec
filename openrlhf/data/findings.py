"""Results of the checks at start: a level, the observation and the fix."""

from dataclasses import dataclass
from enum import StrEnum

from openrlhf.data.errors import DataError
from openrlhf.reporting import notice


class Level(StrEnum):
    """The severity of a finding."""

    PASS = "pass"
    WARNING = "warning"  # the run starts, with a notice
    FAILURE = "failure"  # the run does not start


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of a check. `seen` and `fix` are sentences; a check that passes needs no fix."""

    check: str
    level: Level
    seen: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.seen} {self.fix}".rstrip()


def report(*findings: Finding) -> None:
    """Print each warning as a notice. Raises DataError with all failures."""
    failures: list[str] = []
    for finding in findings:
        if finding.level is Level.WARNING:
            notice(str(finding))
        elif finding.level is Level.FAILURE:
            failures.append(str(finding))
    if failures:
        raise DataError("\n".join(failures))
