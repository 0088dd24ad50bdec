"""Training of a model on several ranks: layout, DeepSpeed engine, optimizer step, optimizers."""
