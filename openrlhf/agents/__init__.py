"""Multi-turn episodes.

The interface for user agents, the processes that run the agents, and an OpenAI-compatible endpoint.
"""
