"""Records what the library warns of on this rank."""

import logging
from contextlib import contextmanager


@contextmanager
def library_warnings():
    """Gives a list, to which the texts of the library's warnings are added."""
    texts = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())
    logger = logging.getLogger("ppe_ddp")
    logger.addHandler(handler)
    level, is_disabled = logger.level, logger.disabled
    logger.setLevel(logging.WARNING)
    logger.disabled = False  # as a library does that configures logging
    try:
        yield texts
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.disabled = is_disabled
