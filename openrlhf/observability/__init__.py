"""What a run measures, logs, shows and reports."""
