"""Roles as plain classes: each takes a `Strategy` and its settings, and is testable without Ray."""
