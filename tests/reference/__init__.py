"""References: plain float64 loops written from the papers, importing nothing of ours."""
