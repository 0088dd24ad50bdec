"""Transformers models that take flat batches of tokens and return their log-probabilities."""
