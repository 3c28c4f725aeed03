"""Which reductions mean something for which dtype, and on which simpler dtype they are the same."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.distributed import ReduceOp

_Kind: Any = ReduceOp.RedOpType
_SUMS = (_Kind.SUM, _Kind.AVG, _Kind.PREMUL_SUM)
_BITWISE = (_Kind.BAND, _Kind.BOR, _Kind.BXOR)
# As in NCCL and in torch's own arithmetic: True + True is True, True * False is False.
_BOOL_KINDS = {
    _Kind.SUM: _Kind.BOR,
    _Kind.MAX: _Kind.BOR,
    _Kind.BOR: _Kind.BOR,
    _Kind.PRODUCT: _Kind.BAND,
    _Kind.MIN: _Kind.BAND,
    _Kind.BAND: _Kind.BAND,
    _Kind.BXOR: _Kind.BXOR,
}
_REAL = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
_WITHOUT_DIVISION = (torch.uint16, torch.uint32, torch.uint64)  # in torch


class ReductionRule(NamedTuple):
    """A reduction that is defined.

    Attributes:
        view: The dtype that a flat tensor's memory is read as: bool as uint8, a sum of complex numbers as real ones.
        kind: What is done with the elements of that dtype: SUM, PRODUCT, MIN, MAX, BAND, BOR or BXOR.
        divides: Whether the result is divided by the number of ranks: towards zero for integers, as in NCCL.
        premultiplies: Whether each rank's numbers are multiplied before.
    """

    view: torch.dtype
    kind: Any
    divides: bool
    premultiplies: bool


def reduction_rule(dtype: torch.dtype, kind: Any) -> ReductionRule:
    """The rule for a dtype and an operation (``ReduceOp.op``).

    Raises:
        TypeError: The operation means nothing for this dtype, such as bits of floating-point numbers.
    """
    divides, premultiplies = kind == _Kind.AVG, kind == _Kind.PREMUL_SUM
    is_sum = kind in _SUMS
    if dtype is torch.bool:
        fits = kind in _BOOL_KINDS
    elif dtype.is_complex:
        fits = is_sum or kind == _Kind.PRODUCT
    elif dtype.is_floating_point:
        fits = kind not in _BITWISE
    else:
        fits = not premultiplies and not (divides and dtype in _WITHOUT_DIVISION)
    if not fits:
        raise TypeError(f"ReduceOp.{kind.name} is not defined for tensors of {dtype}")
    if dtype is torch.bool:
        return ReductionRule(torch.uint8, _BOOL_KINDS[kind], divides, premultiplies)
    view = _REAL.get(dtype, dtype) if is_sum else dtype
    return ReductionRule(view, _Kind.SUM if is_sum else kind, divides, premultiplies)
