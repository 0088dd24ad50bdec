"""Transformers models on our one axis: flat tokens in, log-probabilities of the tokens out."""
