"""Metrics, logs, terminal output and reports of a run."""
