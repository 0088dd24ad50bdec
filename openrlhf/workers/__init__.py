"""Worker roles as plain classes.

Each class takes a `Strategy` and settings, and works without Ray.
"""
