"""One process among its peers: ranks, the optimizer step, DeepSpeed's engine, optimizers."""
