"""A reward model behind HTTP: requests meet in batches, and each gets its own scores."""
