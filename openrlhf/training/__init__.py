"""Training of a model by several ranks: layout, DeepSpeed engine, optimizer step, optimizers."""
