"""The mathematics: pure functions of tensors and numbers, one per paper idea, registered by name.

Per-token blocks have the shape (B, T): position t describes token t, and a mask marks the positions
that count. The functions do not depend on a configuration, a device, an engine or a logger. Losses
return one term per token; the code that owns the optimizer-step window reduces the terms.
"""
