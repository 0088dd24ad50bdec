"""Tests of the mathematics, stated as claims."""
