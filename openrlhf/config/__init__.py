"""Flags as trees of frozen dataclasses.

The package needs only the standard library, and PyYAML for configuration files.
"""
