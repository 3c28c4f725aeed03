"""Multiplies gradients by a factor: the one place that divides by the world size.

A factor costs a pass over memory, unless it is applied where gradients are copied anyway. So whoever copies passes the
factor on to :func:`scale`; a factor of 1 costs nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor


def scale(target: Tensor, source: Tensor, factor: float) -> None:
    """Set ``target`` to ``factor`` times ``source``, in the more precise of their dtypes, in one pass where possible.

    Both have one shape. The target is dense, or the very tensor ``source``; it has all the memory of ``source``, or
    none.
    """
    if target is source or target.data_ptr() == source.data_ptr():
        if factor != 1.0:
            target.mul_(factor)
    elif factor == 1.0:
        target.copy_(source)
    elif target.dtype is source.dtype or torch.promote_types(target.dtype, source.dtype) is source.dtype:
        torch.mul(source, factor, out=target)
    else:  # torch.mul would round to the dtype of the source
        target.copy_(source).mul_(factor)
