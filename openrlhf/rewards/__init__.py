"""Episode rewards: functions, HTTP servers, verifiers, judges, and weighted sums of rewards."""
