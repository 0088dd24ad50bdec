"""Roles as plain classes. Each takes a `Strategy` and its settings, and needs no Ray."""
