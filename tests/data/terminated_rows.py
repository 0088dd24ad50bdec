"""A command that slowly tokenizes many rows."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from datasets import Dataset

from openrlhf.cli.common import plain_ends
from openrlhf.config.supervised import SFTDataConfig
from openrlhf.data import rows
from openrlhf.data.sft import SFTDataset
from openrlhf.data.templates import Passage
from openrlhf.termination import exit_on_signals
from tests.data.small import build_tokenizer


class Slow(SFTDataset):
    def passages(self, row: Mapping[str, Any]) -> list[Passage] | str:
        time.sleep(0.005)
        return super().passages(row)


def tokenize_slowly(count: int) -> None:
    """Tokenize rows in two processes.

    The worker processes import this function, so it must not be in the main module.
    """
    rows.MANY_ROWS = 1000
    rows.usable_cores = lambda: 2
    with plain_ends(), exit_on_signals():
        table = Dataset.from_list(
            [{"input": "a", "output": str(number)} for number in range(count)]
        )
        Slow(table, build_tokenizer(), SFTDataConfig(output_key="output"))
