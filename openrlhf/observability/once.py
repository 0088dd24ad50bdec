"""Warnings that a process logs once."""

import logging
from functools import cache

logger = logging.getLogger(__name__)


@cache
def warn_once(sentence: str) -> None:
    """Log a warning, unless this process has already logged the same sentence."""
    logger.warning("%s", sentence)
