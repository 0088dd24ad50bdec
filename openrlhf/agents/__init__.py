"""Multi-turn episodes.

The package contains the interface for user agents, the processes that run them, and an endpoint for
agents that use the OpenAI API.
"""
