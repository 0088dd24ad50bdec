"""Predicts a run's memory and speed from its flags, without torch and without weights."""
