"""A checkpoint manager for tests."""

from collections.abc import Sequence
from pathlib import Path

from openrlhf.checkpoints.manager import CheckpointManager
from openrlhf.config.shared import CheckpointConfig


def checkpoints_in(
    root: Path | str, *, parts: Sequence[str] = ("",), max_num: int = 3, max_mem_gib: float = 1e8
) -> CheckpointManager:
    """Return a manager for the checkpoints under `root`."""
    return CheckpointManager(
        CheckpointConfig(path=str(root), max_num=max_num, max_mem=max_mem_gib), parts
    )
