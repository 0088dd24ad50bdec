"""Prompts to rewarded trajectories: engines, rewards, and the hosts of user code."""
