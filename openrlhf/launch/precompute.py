"""--ref.precompute: Σ log π_ref of the answers of all rows, once, in a file beside the checkpoints."""

import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.utils.data
from torch import Tensor

from openrlhf.config.flags import notice
from openrlhf.files import write_atomically
from openrlhf.launch.identity import FLAGS, texts_identity
from openrlhf.trainers.tasks import Rows
from openrlhf.training.engine import TrainEngine


class Scored(torch.utils.data.Dataset[Any]):
    """Rows with what the reference says of them."""

    def __init__(self, rows: Rows, sums: list[list[float]]) -> None:
        self.rows, self.sums, self.summary = rows, sums, rows.summary

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return replace(self.rows[index], reference=self.sums[index])


def with_reference(task: Any, rows: Rows, engine: TrainEngine) -> Scored:
    """The rows with the scores in the file of an earlier run with these rows and this reference, or
    with new ones. Collective.
    """
    reference = task.config.ref.model_name_or_path or task.config.model.model_name_or_path
    strategy, identity = engine.strategy, texts_identity(task, rows, FLAGS["reference"], reference)
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
    path = Path(task.config.ckpt.path) / f"reference-{digest}.json"
    sums = strategy.broadcast(
        json.loads(path.read_bytes()) if strategy.is_main and path.exists() else None
    )
    if sums is None:
        sums = reference_sums(task, rows, engine)
        if strategy.is_main:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(sums))
    else:
        notice(f"The reference's log-probabilities are those in {path}.")
    return Scored(rows, sums)


@torch.no_grad()
def reference_sums(task: Any, rows: Rows, engine: TrainEngine) -> list[list[float]]:
    """Σ log π_ref of the answers of each row. Every rank scores a part, with equally many forwards.
    Collective.
    """
    strategy = engine.strategy
    ranks, size, found = strategy.dp_size, task.config.train.micro_batch_size, list[Tensor]()
    mine = list(range(strategy.dp_rank, len(rows), ranks))
    for start in range(0, math.ceil(len(rows) / ranks), size):
        part = [rows[row] for row in mine[start : start + size] or [0]]
        with engine.evaluating():
            micro, _ = task.before(engine, task.collate(part).to(strategy.device))
        found.append(micro.reference.view(len(part), -1).cpu())
    scored = torch.cat(found).tolist()[: len(mine)]
    every = strategy.gather(scored)
    return [every[row % ranks][row // ranks] for row in range(len(rows))]
