"""Episodes of several turns: the contract of user agents, the processes they run in, and the
endpoint for agents that speak the OpenAI API.
"""
