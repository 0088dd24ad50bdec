"""Checks of the installed packages and of this machine, shown by `openrlhf doctor`."""
