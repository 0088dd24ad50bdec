"""Reference implementations: plain float64 loops from the papers that import none of our code."""
