"""Rewards of an episode: functions, HTTP servers, verifiers, judges, and weighted sums of them."""
