"""What the library warns of on this rank: recorded, or not logged."""

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
        with _level(logging.WARNING):
            yield texts
    finally:
        logger.removeHandler(handler)


def without_warnings():
    """A context in which the library warns of nothing on this rank, which serves other tests after this one."""
    return _level(logging.ERROR)


@contextmanager
def _level(level):
    logger = logging.getLogger("ppe_ddp")
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)
