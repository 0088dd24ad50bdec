"""Worker roles as plain classes. Each takes a `Strategy` and settings, and works without Ray."""
