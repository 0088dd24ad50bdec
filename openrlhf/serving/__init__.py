"""HTTP server of a reward model. It scores concurrent requests in batches."""
