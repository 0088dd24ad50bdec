"""HTTP server of a reward model, which scores concurrent requests in batches."""
