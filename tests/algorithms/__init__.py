"""Tests of the algorithms' mathematical properties."""
