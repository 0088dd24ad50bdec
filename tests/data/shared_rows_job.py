"""One rank of the tests of rows that the processes of a machine share. Writes what it has seen, by rank."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, List, Value

from openrlhf.config.shared import DeepSpeedConfig
from openrlhf.data.errors import DataError, row_error
from openrlhf.data.rows import Columns, TokenizedRows, as_columns, as_rows
from openrlhf.data.sft import SFTRow
from openrlhf.distributed.strategy import Strategy

FEATURES = Features(
    {"tokens": List(Value("int32")), "loss_mask": List(Value("bool")), "dropped": Value("string"), "cut": Value("bool")}
)
SIZES = {"training": 200, "evaluation": 7, "broken": 200, "killed": 200}
BROKEN = 150


def tokenized(folder: Path, case: str) -> TokenizedRows[SFTRow]:
    """Letters as tokens. A process that prepares rows leaves a file; in two cases it does not finish."""

    def encode(columns: Columns) -> Columns:
        (folder / f"{case}-{os.getpid()}").touch()
        rows = as_rows(columns)
        if case == "broken":
            raise row_error(rows[BROKEN], "text", "is odd.")
        if case == "killed" and len(list(folder.glob("killed-*"))) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        results = [
            {"tokens": list(map(ord, row["text"])), "loss_mask": [True] * len(row["text"]), "cut": False}
            if row["text"]
            else "empty"
            for row in rows
        ]
        return as_columns(results, FEATURES)

    dataset = Dataset.from_list([{"text": "ab" * number} for number in range(SIZES[case])])
    return TokenizedRows(SFTRow, dataset, ["text"], encode, FEATURES, what="row", advice="", max_len=1000)


def seen(folder: Path, case: str) -> Any:
    """Everything that a trainer sees of a dataset: its summary and rows, or the error."""
    try:
        rows = tokenized(folder, case)
    except DataError as error:
        return str(error)
    return [rows.summary, *(vars(rows[number]) for number in range(len(rows)))]


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    Strategy(DeepSpeedConfig(param_dtype="fp32"), seed=0)
    report: dict[str, Any] = {case: seen(folder, case) for case in sys.argv[2:]}
    kept = tokenized(folder, "training") if "training" in report else None
    report["mapped"] = kept is not None and "/openrlhf-rows-" in Path("/proc/self/maps").read_text()
    (folder / f"rank-{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
