"""Engines, routing and the generator, which turns prompts into rewarded trajectories."""
