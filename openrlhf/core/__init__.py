"""Data that the stages of a run pass to each other: prompts, episodes and batches."""
