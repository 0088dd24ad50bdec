"""Chat templates that insert a date use the date on which the run first started."""

from __future__ import annotations

import pickle

import pytest

from openrlhf.data.clock import set_clock
from openrlhf.data.first_look import dated_template
from openrlhf.data.first_start import now
from openrlhf.data.templates import render
from tests.data.small import PLAIN_CHAT
from tests.tiny import character_tokenizer

DATED = "{{ strftime_now('%d %b %Y') }}" + PLAIN_CHAT
CHAT = [{"role": "user", "content": "hi"}]


def test_template_renders_the_date_that_was_set() -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = DATED
    set_clock(tokenizer, "2027-01-15T23:59:59")
    assert render(tokenizer, CHAT).startswith("15 Jan 2027")
    assert render(pickle.loads(pickle.dumps(tokenizer)), CHAT).startswith("15 Jan 2027"), (
        "in other processes too"
    )


def test_template_without_a_date_is_unchanged() -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = PLAIN_CHAT
    before = vars(tokenizer).copy()
    set_clock(tokenizer, now())
    assert vars(tokenizer).keys() == before.keys()
    tokenizer.chat_template = None
    set_clock(tokenizer, now())
    assert vars(tokenizer).keys() == before.keys()


def test_fixed_date_is_not_saved_with_the_tokenizer(tmp_path: object) -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = DATED
    set_clock(tokenizer, "2027-01-15T23:59:59")
    tokenizer.save_pretrained(str(tmp_path))
    read = type(tokenizer).from_pretrained(str(tmp_path))
    assert not render(read, CHAT).startswith("15 Jan 2027")


@pytest.mark.parametrize(
    ("template", "dated"),
    [
        (DATED, True),
        (
            "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% endif %}" + PLAIN_CHAT,
            True,
        ),
        (
            "{% if messages[0].role != 'system' %}{{ raise_exception('strftime_now') }}{% endif %}",
            True,
        ),
        ("{% if tools %}{{ strftime_now('%d %b %Y') }}{% endif %}" + PLAIN_CHAT, False),
        (PLAIN_CHAT, False),
        (None, False),
    ],
)
def test_template_that_depends_on_the_date_is_reported_with_a_suggested_fix(
    template: str | None, dated: bool
) -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = template
    set_clock(tokenizer, "2027-01-15T23:59:59")
    found = dated_template(tokenizer)
    assert len(found) == dated
    for finding in found:
        assert not finding.fails
        assert "2027-01-15" in finding.seen and "--data.tokenizer_chat_template" in finding.fix
