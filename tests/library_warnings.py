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
    try:
        yield texts
    finally:
        logger.removeHandler(handler)
