"""References: plain float64 loops written from the papers, which import none of our modules."""
