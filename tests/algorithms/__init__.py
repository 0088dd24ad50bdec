"""The mathematics, stated as claims."""
