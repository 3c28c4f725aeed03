"""The layout of masks and votes: their fields, each written so that the maximum over the ranks tells all of them. Pure.

    field      bytes          mask, before the first bucket              vote, beside the last bucket
    present    a parameter    this rank has its gradient                 its gradient came late
    nodes      a parameter    on which node it exists, on several nodes  as in the mask (plan.py)
    statuses   a rank         whether it contributes                     what went wrong (unused_forwards.py)
    writers    a module       whether, and by which rank, its buffers were written (:func:`highest_digits` ...)
    apart      16             what is not ended together (shared_parameters.py)
    learned    32             digest of what this rank has learned: where one has another, all begin anew

A field that is added is written in ``Negotiation.start()`` and read in ``Negotiation.finish()``. It may depend on the
parameters, buffers and options, on which all ranks agree, and on nothing else: a message is as long on every rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_COMPLEMENT = bytes(255 - value for value in range(256))
_BASE = 255  # digits of a rank: 255 - digit is sent, so that the maximum is the smallest digit, and 0 is none


def with_complement(digest: bytes) -> bytes:
    """``digest``, and each of its bytes from 255: the maxima are still complements if all ranks have sent the same."""
    return digest + digest.translate(_COMPLEMENT)


def is_same(field: bytes) -> bool:
    """Whether all ranks have sent the same digest in this field, written by :func:`with_complement`."""
    half = len(field) // 2
    return field[:half].translate(_COMPLEMENT) == field[half:]


def by_rank(value: int, rank: int, world_size: int) -> bytes:
    """A field of one byte a rank, written by ``rank``."""
    field = bytearray(world_size)
    field[rank] = value
    return bytes(field)


def highest_digits(is_writer: Sequence[bool], rank: int) -> bytes:
    """The first of two fields that name the lowest rank for which something is so, one byte for each such thing.

    Args:
        is_writer: Whether it is so for this rank, each thing.
        rank: This rank; below 65,025.
    """
    return bytes(_BASE - rank // _BASE if here else 0 for here in is_writer)


def lowest_digits(agreed: bytes, is_writer: Sequence[bool], rank: int) -> bytes:
    """The second field, once all ranks know the first: only ranks with the smallest first digit write.

    Args:
        agreed: The maxima of the first field.
        is_writer: As before.
        rank: As before.
    """
    own = _BASE - rank // _BASE
    return bytes(
        _BASE - rank % _BASE if here and first == own else 0 for here, first in zip(is_writer, agreed, strict=True)
    )


def ranks_named(first: bytes, second: bytes, default: int) -> list[int]:
    """The lowest rank for each thing, by the maxima of both fields; ``default`` where it is so for none."""
    return [
        (_BASE - high) * _BASE + _BASE - low if high and low else default
        for high, low in zip(first, second, strict=True)
    ]
