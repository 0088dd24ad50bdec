"""From prompts to rewarded trajectories: engines, routing, and the generator."""
