"""Generates rewarded trajectories from prompts: engines, routing, and the generator."""
