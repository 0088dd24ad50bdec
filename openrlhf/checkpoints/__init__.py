"""Checkpoints: writing, retention, exports and resuming."""
