"""Flags as trees of frozen dataclasses: standard library only, and PyYAML for files."""
