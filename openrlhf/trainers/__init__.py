"""The training loops: supervised stages and reinforcement learning."""
