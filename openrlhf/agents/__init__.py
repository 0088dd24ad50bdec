"""Multi-turn episodes.

The package contains the interface for user agents, the processes that run them, and an
OpenAI-compatible endpoint for agents that use that API.
"""
