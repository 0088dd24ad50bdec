"""Tests that state claims about the mathematics."""
