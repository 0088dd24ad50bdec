"""Flags as trees of frozen dataclasses: standard library only, PyYAML where a file is read or written."""
