"""Computes Σ log π_ref of the answers in every row once, before training (--ref.precompute).

The sums are stored in a file beside the checkpoints.
"""

import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from openrlhf.files import write_atomically
from openrlhf.launch.identity import FLAGS, texts_identity
from openrlhf.reporting import notice
from openrlhf.trainers.tasks import Rows
from openrlhf.training.engine import TrainEngine


class Scored:
    """Rows, with the summed log-probability of each answer under the reference model."""

    def __init__(self, rows: Rows, sums: list[list[float]]) -> None:
        self.rows = rows
        self.sums = sums
        self.summary = rows.summary

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return replace(self.rows[index], reference=self.sums[index])


def with_reference(task: Any, rows: Rows, engine: TrainEngine) -> Scored:
    """Return the rows, with Σ log π_ref of each answer. Collective.

    The sums are read from the file of an earlier run with the same rows and reference model. If
    there is no such file, the sums are computed and written to a file. If the file cannot be
    written, for example because the disk is full, a notice is printed.
    """
    strategy = engine.strategy
    reference = task.config.ref.model_name_or_path or task.config.model.model_name_or_path
    identity = texts_identity(task, rows, FLAGS["reference"], reference)
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
    path = Path(task.config.ckpt.path) / f"reference-{digest}.json"
    sums: list[list[float]] | None = None
    if strategy.is_main and path.exists():
        sums = json.loads(path.read_bytes())
    sums = strategy.broadcast(sums)
    if sums is not None:
        notice(f"Reusing the reference log-probabilities stored in {path}.")
        return Scored(rows, sums)
    sums = reference_sums(task, rows, engine)
    if strategy.is_main:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(sums))
        except OSError as error:
            notice(
                f"Cannot store the reference log-probabilities in {path}: "
                f"{error.strerror or error}. The run continues, but another run must compute them "
                "again."
            )
    return Scored(rows, sums)


@torch.no_grad()
def reference_sums(task: Any, rows: Rows, engine: TrainEngine) -> list[list[float]]:
    """Return Σ log π_ref of the answers of each row. Collective.

    Rank r scores rows r, r + ranks, r + 2 · ranks, … Every rank runs as many forward passes as rank
    0, which has the most rows.
    """
    strategy = engine.strategy
    ranks = strategy.dp_size
    size = task.config.train.micro_batch_size
    own = range(strategy.dp_rank, len(rows), ranks)
    rows_of_rank_0 = math.ceil(len(rows) / ranks)
    scored: list[list[float]] = []
    with engine.evaluating():
        for start in range(0, rows_of_rank_0, size):
            part = [rows[row] for row in own[start : start + size] or [0]]
            micro, _ = task.before(engine, task.collate(part).to(strategy.device))
            scored += micro.reference.view(len(part), -1).tolist()
    gathered = strategy.gather(scored[: len(own)])
    sums: list[list[float]] = []
    for row in range(len(rows)):
        place, rank = divmod(row, ranks)
        sums.append(gathered[rank][place])
    return sums
