"""A reward model behind HTTP: concurrent requests are scored in batches."""
