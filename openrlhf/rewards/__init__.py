"""What rewards an episode: Python functions, HTTP servers, verifiers, judges, and weighted sums of
them.
"""
