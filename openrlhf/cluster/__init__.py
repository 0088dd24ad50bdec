"""Ray: which process runs on which device of which machine."""
