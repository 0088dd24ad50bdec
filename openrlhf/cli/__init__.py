"""One thin module per command: flags in, the stage's `run` called."""
