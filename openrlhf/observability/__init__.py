"""What a run measures, writes down, shows and reports."""
