"""Checkpoints: which are kept, how one is written, and what a run resumes from."""
