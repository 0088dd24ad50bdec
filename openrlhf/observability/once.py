"""A warning that a process gives once."""

import logging
from functools import cache

logger = logging.getLogger(__name__)


@cache
def warn_once(sentence: str) -> None:
    """Log a warning, unless this process has logged the same one before."""
    logger.warning("%s", sentence)
