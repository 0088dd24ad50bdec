"""A chat template that writes the date writes that of a run's first start."""

from __future__ import annotations

import pickle

from openrlhf.data.clock import set_clock
from openrlhf.data.first_start import now
from openrlhf.data.templates import render
from tests.data.small import PLAIN_CHAT
from tests.tiny import character_tokenizer

DATED = "{{ strftime_now('%d %b %Y') }}" + PLAIN_CHAT
CHAT = [{"role": "user", "content": "hi"}]


def test_the_date_of_a_template_is_that_of_the_given_moment() -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = DATED
    (notice,) = set_clock(tokenizer, "2027-01-15T23:59:59")
    assert "2027-01-15" in notice
    assert render(tokenizer, CHAT).startswith("15 Jan 2027")
    assert render(pickle.loads(pickle.dumps(tokenizer)), CHAT).startswith("15 Jan 2027"), "in other processes too"


def test_a_template_without_a_date_is_left_alone() -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = PLAIN_CHAT
    before = vars(tokenizer).copy()
    assert set_clock(tokenizer, now()) == []
    assert vars(tokenizer).keys() == before.keys()
    tokenizer.chat_template = None
    assert set_clock(tokenizer, now()) == []


def test_a_stopped_clock_is_not_written_to_the_tokenizers_files(tmp_path: object) -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = DATED
    set_clock(tokenizer, "2027-01-15T23:59:59")
    tokenizer.save_pretrained(str(tmp_path))
    read = type(tokenizer).from_pretrained(str(tmp_path))
    assert not render(read, CHAT).startswith("15 Jan 2027")
