"""Checkpoints: which are kept, how one is written, and what a run resumes from."""

from openrlhf.checkpoints.manager import CheckpointManager, StagedCheckpoint
from openrlhf.checkpoints.manifest import Checkpoint, CheckpointError, EngineLayout, RunState

__all__ = ["Checkpoint", "CheckpointError", "CheckpointManager", "EngineLayout", "RunState", "StagedCheckpoint"]
