"""Prompts to rewarded trajectories: engines, routing, and the generator."""
