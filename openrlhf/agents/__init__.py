"""Multi-turn episodes.

The package has the contract of user agents, the processes that run them, and the endpoint for
agents that use the OpenAI API.
"""
