"""Tests for the mathematics, stated as claims."""
