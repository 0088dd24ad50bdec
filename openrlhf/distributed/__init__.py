"""Processes, devices, and what moves between them."""
