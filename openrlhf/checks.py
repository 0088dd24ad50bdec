"""Findings of a command's startup checks: what was found and how to fix it.

A check returns a list of findings, which is empty if all is well. A check may also raise UserError,
which counts as a failure. `collect` runs independent checks, and `report` shows all their findings
at once, for a real run and for --dry_run alike.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from openrlhf.config.flags import ConfigError, UserError
from openrlhf.reporting import notice

T = TypeVar("T")


@dataclass(frozen=True)
class Finding:
    """A result of a check. `seen` and `fix` are sentences.

    If `fails`, the command does not start; otherwise the finding is printed as a notice. If
    `passes`, nothing is wrong, and only `openrlhf doctor` shows the finding. `error` is the
    exception that the check raised, if any.
    """

    seen: str
    fix: str = ""
    fails: bool = False
    passes: bool = False
    error: UserError | None = None

    def __str__(self) -> str:
        return f"{self.seen} {self.fix}".rstrip()


class CheckError(ConfigError):
    """One or more failed checks. The message has one line per failure."""


def collect(*checks: Callable[[], Iterable[Finding] | None]) -> list[Finding]:
    """Run all checks, even if some raise UserError, and return their findings."""
    found: list[Finding] = []
    for check in checks:
        try:
            found += check() or ()
        except UserError as error:
            found.append(Finding(str(error), fails=True, error=error))
    return found


def report(*findings: Finding) -> None:
    """Print each finding that is not a failure as a notice. Raises CheckError with all failures.

    If the only failure is an exception raised by a check, re-raises it instead.
    """
    failures: list[Finding] = []
    # The checks of the training set and of the evaluation set may return the same finding.
    distinct = {str(finding): finding for finding in findings}
    for text, finding in distinct.items():
        if finding.fails:
            failures.append(finding)
        elif not finding.passes:
            notice(text)
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


def loaded(load: Callable[[], T], *others: Callable[[], Iterable[Finding] | None]) -> T:
    """Return the result of `load`.

    If `load` raises UserError, run the independent checks `others` as well, and raise all failures
    together.
    """
    try:
        return load()
    except UserError as error:
        report(Finding(str(error), fails=True, error=error), *collect(*others))
        raise
