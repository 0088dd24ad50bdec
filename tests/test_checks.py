"""Findings of checks: warnings become notices, and all failures are shown at once."""

from __future__ import annotations

import pytest

from openrlhf.checks import CheckError, Finding, collect, report
from openrlhf.config.flags import ConfigError, UserError


def raising(message: str) -> list[Finding]:
    raise ConfigError(message)


def test_warnings_become_notices_and_fixes_follow_what_was_seen(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report(Finding("Few rows.", "Add some."), Finding("Slow."))
    assert capsys.readouterr().err == "[notice] Few rows. Add some.\n[notice] Slow.\n"


def test_all_checks_run_and_all_failures_are_raised_together(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = collect(
        lambda: [Finding("w")],
        lambda: raising("a"),
        lambda: None,
        lambda: [Finding("b", "c", fails=True)],
    )
    with pytest.raises(CheckError) as caught:
        report(*found)
    assert str(caught.value).splitlines() == ["2 mistakes:", "  - a", "  - b c"]
    assert capsys.readouterr().err == "[notice] w\n"


def test_error_of_a_check_that_is_the_only_failure_is_raised_itself() -> None:
    with pytest.raises(ConfigError, match=r"^a$"):
        report(*collect(lambda: raising("a"), list))


def test_other_exceptions_are_not_findings() -> None:
    def broken() -> list[Finding]:
        raise KeyError("ours")

    with pytest.raises(KeyError):
        collect(broken)
    assert issubclass(CheckError, UserError)


def test_violations_of_one_error_are_listed_beside_other_failures() -> None:
    def two_mistakes() -> None:
        raise ConfigError(["a", "b"])

    found = collect(two_mistakes, lambda: [Finding("c", fails=True)])
    with pytest.raises(CheckError) as caught:
        report(*found)
    assert caught.value.violations == ["a", "b", "c"]
