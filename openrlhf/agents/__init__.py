"""Episodes of several turns.

The contract of user agents, the processes that they run in, and the endpoint for agents that speak
the OpenAI API.
"""
