"""Prepares rows of token ids: tokenizers, datasets, chat templates and batching."""
