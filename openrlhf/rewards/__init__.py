"""Rewards of an episode: functions, HTTP servers, verifiers, judges, and their weighted sums."""
