"""From the flags to a running system, and to its end."""
