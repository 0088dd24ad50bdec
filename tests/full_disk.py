"""A stand-in for a full disk."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Make writes beyond the first `size` bytes of a file fail until the block exits.

    Part of a line may still be written, as happens on a disk that fills up. Use the fixture
    `capsys`; otherwise printed text would also be written to a file.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
