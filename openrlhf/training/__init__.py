"""Trains a model on several ranks: layout, DeepSpeed engine, optimizer step, optimizers."""
