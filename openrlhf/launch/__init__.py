"""The start, the checks and the end of every command, from its flags."""
