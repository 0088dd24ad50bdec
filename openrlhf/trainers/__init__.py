"""The loops: supervised stages and reinforcement learning."""
