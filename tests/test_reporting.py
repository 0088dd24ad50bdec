"""Tests for user messages: their streams, which processes print them, repetition, and secrets."""

from __future__ import annotations

import pytest

from openrlhf import reporting


def test_results_go_to_stdout_and_other_messages_to_stderr(
    capsys: pytest.CaptureFixture[str],
) -> None:
    reporting.say("one", "two")
    reporting.say("three", end="")
    assert capsys.readouterr() == ("one\ntwo\nthree", "")
    reporting.notice("a", "b")
    reporting.warn("c")
    reporting.alert("error: d")
    assert capsys.readouterr() == ("", "[notice] a\n[notice] b\n[warning] c\nerror: d\n")


def test_only_rank_0_prints_notices_but_every_rank_prints_warnings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    reporting.notice("a")
    reporting.warn("b")
    assert capsys.readouterr().err == "[warning] b\n"


def test_warn_once_prints_each_sentence_once(capsys: pytest.CaptureFixture[str]) -> None:
    reporting.warn_once.cache_clear()
    for sentence in ("a", "b", "a"):
        reporting.warn_once(sentence)
    assert capsys.readouterr().err == "[warning] a\n[warning] b\n"


@pytest.mark.parametrize("tell", [reporting.notice, reporting.warn, reporting.alert])
def test_secrets_are_masked(tell: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert callable(tell)
    tell("http://me:hunter2@host/v1?token=hunter2&model=m does not answer")
    printed = capsys.readouterr().err
    assert "hunter2" not in printed and "model=m does not answer" in printed
