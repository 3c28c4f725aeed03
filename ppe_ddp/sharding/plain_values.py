"""Values that are no tensors as bytes, and back, without executing anything.

They are what ``torch.load(weights_only=True)`` reads: tensors, plain Python values in lists, tuples and dictionaries,
and the classes that a user has added by ``torch.serialization.add_safe_globals``.
"""

from __future__ import annotations

import io
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint

_PLAIN = (str, int, float, bool, type(None))


def dump_plain(value: Any) -> bytes:
    """The bytes of a value, which :func:`load_plain` reads.

    Raises:
        TypeError: Loading it would run code, or it cannot be saved at all; says what it is made of.
    """
    content = io.BytesIO()
    try:
        torch.save(value, content)
    except Exception as error:
        raise TypeError(f"it is a {type(value).__name__}, which cannot be saved: {error}") from error
    if not isinstance(value, _PLAIN):
        content.seek(0)
        unsafe = get_unsafe_globals_in_checkpoint(content)
        if unsafe:
            raise TypeError(
                f"it is a {type(value).__name__} with {', '.join(sorted(unsafe))}, and loading that would run code: "
                "keep tensors and plain values there, or allow the class on every rank by "
                "torch.serialization.add_safe_globals"
            )
    return content.getvalue()


def load_plain(content: bytes) -> Any:
    """The value of :func:`dump_plain`, its tensors on the CPU.

    Raises:
        pickle.UnpicklingError: It would run code.
    """
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
