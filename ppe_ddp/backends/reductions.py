"""The reduction of tensors of each dtype over a wire. A dtype that a wire does not support is sent in a wider one.

Wires reject no dtype: gloo sums bools as bytes, and rounds half-precision numbers at every step of its ring.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

_Kind: Any = ReduceOp.RedOpType
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
_WITHOUT_DIVISION = (torch.uint16, torch.uint32, torch.uint64)  # dtypes that torch cannot divide
_WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
_COMPLEX = (torch.complex64, torch.complex128)
_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
FOLDED = frozenset((torch.float32, torch.float64, torch.uint8, *_SIGNED, *_COMPLEX))
"""The dtypes of :meth:`WireReduction.fold`; torch has no arithmetic for the other unsigned integers."""
_LOWEST = torch.iinfo(torch.int64).min
_FOLDS: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    _Kind.SUM: torch.add,
    _Kind.PRODUCT: torch.mul,
    _Kind.MIN: torch.minimum,
    _Kind.MAX: torch.maximum,
    _Kind.BAND: torch.bitwise_and,
    _Kind.BOR: torch.bitwise_or,
    _Kind.BXOR: torch.bitwise_xor,
}


@dataclass(frozen=True)
class WireReduction:
    """The reduction of elements of one dtype by one operation over one wire."""

    # The dtype as which a flat tensor's memory is read: bool as uint8, a sum of complex numbers as real numbers.
    view: torch.dtype
    # The dtype that is sent. If it is not ``view``, the numbers are converted, and rounded once.
    wire: torch.dtype
    kind: Any  # the operation of the wire: SUM, PRODUCT, MIN, MAX, BAND, BOR or BXOR
    divides: bool  # whether the result is divided by the number of ranks, integers towards zero, as in NCCL
    is_offset: bool  # whether unsigned numbers are sent as signed numbers with the same order
    is_known: bool  # whether the wire can reduce; else the ranks exchange their numbers, and :meth:`fold` reduces

    def to_wire(self, elements: Tensor, scratch: Tensor | None = None) -> Tensor:
        """Convert ``elements`` (1-D, contiguous, of dtype ``view``) to the numbers that are sent, in ``scratch``.

        Without ``scratch`` they stay in their own memory if no conversion is needed.
        """
        wire = elements.to(self.wire) if scratch is None else scratch.copy_(elements)
        return wire ^ _LOWEST if self.is_offset else wire

    def fold(self, rows: Sequence[Tensor]) -> Tensor:
        """Reduce the numbers of all ranks, in rank order."""
        return functools.reduce(_FOLDS[self.kind], rows)

    def from_wire(self, wire: Tensor, elements: Tensor, size: int) -> None:
        """Convert the result over ``size`` ranks back, and write it to ``elements``, of dtype ``view``."""
        if self.divides:
            wire.div_(size, rounding_mode=None if wire.is_floating_point() else "trunc")
        if self.is_offset:
            wire = wire ^ _LOWEST
        if elements.data_ptr() != wire.data_ptr():
            elements.copy_(wire)


@functools.cache
def reduction_of(dtype: torch.dtype, kind: Any, known: frozenset[torch.dtype]) -> WireReduction:
    """The reduction for a dtype and an operation (``ReduceOp.op``), over a wire that supports the ``known`` dtypes.

    TypeError if the operation is not defined for this dtype, such as BAND for floating-point numbers.
    """
    divides = kind == _Kind.AVG
    is_sum = divides or kind == _Kind.SUM
    if kind == _Kind.PREMUL_SUM:
        fits = False
    elif dtype is torch.bool:
        fits = kind in _BOOL_KINDS
    elif dtype.is_complex:
        fits = is_sum or kind == _Kind.PRODUCT
    elif dtype.is_floating_point:
        fits = kind not in _BITWISE
    else:
        fits = not (divides and dtype in _WITHOUT_DIVISION)
    if not fits:
        raise TypeError(f"ReduceOp.{kind.name} is not defined for tensors of {dtype}")
    if dtype is torch.bool:
        view, base = torch.uint8, _BOOL_KINDS[kind]
    else:
        view, base = (dtype.to_real(), _Kind.SUM) if is_sum else (dtype, kind)
    is_offset = False
    if view is torch.uint64 and view not in known:
        view, is_offset = torch.int64, base in (_Kind.MIN, _Kind.MAX)
    if view in known or view in _COMPLEX:
        wire = view
    else:
        wire = _WIDER.get(view, torch.complex64 if view.is_complex else torch.float32)
    return WireReduction(view, wire, base, divides, is_offset, wire in known)
