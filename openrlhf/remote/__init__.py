"""Servers that we did not start: rewards, judges and engines behind HTTP, asked with patience and bounds."""
