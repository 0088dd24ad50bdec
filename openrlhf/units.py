"""Units of memory in bytes, and their format."""

MIB = 2**20
GIB = 2**30


def in_gib(size: float, digits: int = 3) -> str:
    """Format a number of bytes in GiB with this number of significant digits."""
    return f"{size / GIB:.{digits}g} GiB"
