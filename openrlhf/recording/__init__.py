"""A run in halves: episodes written to disk, and read back in place of engines."""
