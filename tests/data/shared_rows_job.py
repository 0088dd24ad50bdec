"""A script that runs one rank in the tests of rows shared by a machine's processes.

Each rank writes its rows to a file.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from datasets import Dataset

from openrlhf.config.machine import world_size
from openrlhf.config.shared import DeepSpeedConfig
from openrlhf.config.supervised import SFTDataConfig
from openrlhf.data.errors import ROW, DataError, row_error
from openrlhf.data.rows import Result, TokenizedRows
from openrlhf.data.sft import SFTRow
from openrlhf.data.templates import Encoded, Passage
from openrlhf.training.layout import RankLayout
from openrlhf.training.strategy import Strategy
from tests.data.small import build_tokenizer

SIZES = {"training": 200, "evaluation": 7, "broken": 200, "killed": 200}
BROKEN = 150


class Letters(TokenizedRows[SFTRow]):
    """A dataset with one token per letter.

    Each process that prepares rows creates a file. Two of the cases make the process fail or die
    midway.
    """

    row = SFTRow
    keys = ("input_key",)

    def __init__(self, folder: Path, case: str) -> None:
        self.folder, self.case = folder, case
        dataset = Dataset.from_list([{"text": "ab" * number} for number in range(SIZES[case])])
        super().__init__(dataset, build_tokenizer(), SFTDataConfig(input_key="text", max_len=1000))

    def passages(self, row: Mapping[str, Any]) -> list[Passage] | str:
        (self.folder / f"{self.case}-{os.getpid()}").touch()
        if self.case == "broken" and row[ROW] == BROKEN + 1:
            raise row_error(row, "text", "is odd.")
        if self.case == "killed" and len(list(self.folder.glob("killed-*"))) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return [Passage(text=row["text"], spans=[], response=0)] if row["text"] else "empty"

    def columns(
        self, row: Mapping[str, Any], passages: list[Passage], encoded: list[Encoded]
    ) -> Result:
        tokens = encoded[0].tokens
        return {"tokens": tokens, "loss_mask": [True] * len(tokens), "cut": False}


def seen(folder: Path, case: str) -> Any:
    """Return everything a trainer gets from a dataset: the summary and the rows, or the error."""
    try:
        rows = Letters(folder, case)
    except DataError as error:
        return str(error)
    return [rows.summary, *(vars(rows[number]) for number in range(len(rows)))]


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    ds = DeepSpeedConfig(param_dtype="fp32")
    Strategy(ds, RankLayout.from_flags(ds, processes=world_size()), seed=0)
    report: dict[str, Any] = {case: seen(folder, case) for case in sys.argv[2:]}
    kept = Letters(folder, "training") if "training" in report else None
    report["mapped"] = kept is not None and "/openrlhf-rows-" in Path("/proc/self/maps").read_text()
    (folder / f"rank-{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
