"""Separate, killable processes for untrusted code: user functions, agents, sandboxed programs."""
