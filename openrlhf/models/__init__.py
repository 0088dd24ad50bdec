"""Transformers models behind our one axis: flat tokens in, log-probabilities of those tokens out."""
