"""Flags as trees of frozen dataclasses: parsing, old names, derived values, rules.

Standard library only, PyYAML where a file is read or written.
"""
