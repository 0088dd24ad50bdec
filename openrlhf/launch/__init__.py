"""Startup, checks and shutdown of every command, driven by its flags."""
