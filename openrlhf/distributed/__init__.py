"""Processes, devices, and the data that moves between them."""
