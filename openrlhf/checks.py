"""Findings of the checks at the start of a command: what was seen and the fix.

A check returns its findings, none if all is well. It may also raise UserError, which counts as a
failure. `collect` runs checks that do not depend on each other, and `report` shows everything that
they found at once, the same for a start and for --dry_run.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from openrlhf.config.flags import ConfigError, UserError
from openrlhf.reporting import notice


@dataclass(frozen=True)
class Finding:
    """One result of a check. `seen` and `fix` are sentences.

    If `fails`, the command does not start; otherwise the result is printed as a notice. `error` was
    raised by the check.
    """

    seen: str
    fix: str = ""
    fails: bool = False
    error: UserError | None = None

    def __str__(self) -> str:
        return f"{self.seen} {self.fix}".rstrip()


class CheckError(ConfigError):
    """Failures of checks. The message has a line for each."""


def collect(*checks: Callable[[], Iterable[Finding] | None]) -> list[Finding]:
    """Run all checks, also after one has raised a UserError, and return their findings."""
    found: list[Finding] = []
    for check in checks:
        try:
            found += check() or ()
        except UserError as error:
            found.append(Finding(str(error), fails=True, error=error))
    return found


def report(*findings: Finding) -> None:
    """Print each finding that is no failure as a notice. Raises CheckError with all failures.

    If the only failure is an error that a check raised, that error is raised instead.
    """
    failures: list[Finding] = []
    for finding in findings:
        if finding.fails:
            failures.append(finding)
        else:
            notice(str(finding))
    if len(failures) == 1 and failures[0].error:
        raise failures[0].error
    violations: list[str] = []
    for failure in failures:
        if isinstance(failure.error, ConfigError):
            violations += failure.error.violations
        else:
            violations.append(str(failure))
    if violations:
        raise CheckError(violations)
