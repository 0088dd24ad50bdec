"""From flags to a running system: what is read, placed, started, connected and, at the end, stopped."""
