"""Checks of the installed packages and this machine for `openrlhf doctor`."""
