"""The mathematics: pure functions of tensors and numbers, one paper idea each, registered by name.

Per-token blocks are (B, T) on one axis: position t describes token t, and a mask says which
positions count. Nothing here knows a configuration, a device, an engine or a logger. Losses return
terms per token. The owner of the optimizer-step window reduces the terms.
"""
