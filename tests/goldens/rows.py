"""Toy data for the goldens; it must not change because the recorded numbers depend on it."""

from __future__ import annotations

import random
from typing import Any

EOS = "<eos>"


def words(count: int, seed: int) -> list[str]:
    """Return distinct words of two to seven letters."""
    draw = random.Random(seed)
    found: dict[str, None] = {}
    while len(found) < count:
        word = "".join(draw.choices("abcdefgh", k=draw.randint(2, 7)))
        found[word] = None
    return list(found)


def copying_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Return rows in which the answer repeats the input word."""
    return [{"input": word, "output": word + EOS} for word in words(count, seed)]


def preference_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Return pairs that prefer the word to the alphabet positions of its letters."""
    rows = []
    for word in words(count, seed):
        digits = "".join(str(ord(letter) - ord("a")) for letter in word)
        rows.append({"prompt": word, "chosen": word + EOS, "rejected": digits + EOS})
    return rows
