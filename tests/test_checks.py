"""Findings of startup checks: warnings become notices, and all failures are reported at once."""

from __future__ import annotations

import pytest

from openrlhf.checks import CheckError, Finding, collect, loaded, report
from openrlhf.config.flags import ConfigError, UserError


def raising(message: str) -> list[Finding]:
    raise ConfigError(message)


def test_warnings_are_printed_as_notices_followed_by_fixes(
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


def test_single_failing_check_raises_its_own_error() -> None:
    with pytest.raises(ConfigError, match=r"^a$"):
        report(*collect(lambda: raising("a"), list))


def test_other_exceptions_propagate() -> None:
    def broken() -> list[Finding]:
        raise KeyError("ours")

    with pytest.raises(KeyError):
        collect(broken)
    assert issubclass(CheckError, UserError)


def test_violations_of_a_config_error_are_listed_with_other_failures() -> None:
    def two_mistakes() -> None:
        raise ConfigError(["a", "b"])

    found = collect(two_mistakes, lambda: [Finding("c", fails=True)])
    with pytest.raises(CheckError) as caught:
        report(*found)
    assert caught.value.violations == ["a", "b", "c"]


def test_identical_failures_of_two_checks_are_reported_once() -> None:
    def failing() -> list[Finding]:
        raise UserError("the token is unknown")

    with pytest.raises(UserError) as caught:
        report(*collect(failing, failing))
    assert str(caught.value) == "the token is unknown"


def test_failed_load_is_reported_with_other_failures() -> None:
    with pytest.raises(CheckError) as caught:
        loaded(lambda: raising("a"), lambda: raising("b"), lambda: [Finding("c", fails=True)])
    assert caught.value.violations == ["a", "b", "c"]
    with pytest.raises(ConfigError, match=r"^a$"):
        loaded(lambda: raising("a"), list)
    assert loaded(lambda: 1, lambda: raising("not run")) == 1
