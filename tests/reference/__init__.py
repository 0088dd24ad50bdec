"""Reference implementations: plain float64 loops written from the papers, without our code."""
