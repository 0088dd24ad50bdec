"""Episodes of several turns: the contract of user agents, the hosts they run in, and the endpoint that others speak to."""
