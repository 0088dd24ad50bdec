"""Metrics, logs, terminal output and reports."""
