"""Prompts to rewarded trajectories: engines, agents, rewards, and the hosts of user code."""
