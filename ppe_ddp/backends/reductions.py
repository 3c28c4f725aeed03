"""How tensors of each dtype are reduced: apart from the collectives because wrong numbers would come from here.

Wires know few dtypes and complain about none: gloo sums bools as bytes and rounds halves at every step of its ring, MPI
knows no bfloat16. What a wire does not know travels in a wider dtype, and is rounded once.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
_REAL = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
_WITHOUT_DIVISION = (torch.uint16, torch.uint32, torch.uint64)  # in torch
_WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
_COMPLEX = (torch.complex64, torch.complex128)
_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
FOLDED = frozenset((torch.float32, torch.float64, torch.uint8, *_SIGNED, *_COMPLEX))
"""What :meth:`WireReduction.fold` computes with: torch has no arithmetic of the other unsigned numbers."""
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
    """How the elements of one dtype are reduced by one operation over one wire."""

    # The dtype that a flat tensor's memory is read as: bool as uint8, a sum of complex numbers as real ones.
    view: torch.dtype
    # The dtype in which the numbers travel; where it is not ``view``, they are converted, and rounded once.
    wire: torch.dtype
    kind: Any  # what is done with those: SUM, PRODUCT, MIN, MAX, BAND, BOR or BXOR
    divides: bool  # whether the result is divided by the number of ranks: towards zero for integers, as in NCCL
    is_offset: bool  # whether unsigned numbers travel as signed ones of the same order
    is_known: bool  # whether the wire can compute it; else the ranks exchange their numbers, and :meth:`fold` does

    def to_wire(self, elements: Tensor, scratch: Tensor | None = None) -> Tensor:
        """What travels of ``elements``, 1-D and contiguous, of dtype ``view``.

        It lies in ``scratch``, as long and of dtype ``wire``; without it in their own memory, if nothing has to be done
        before.
        """
        wire = elements.to(self.wire) if scratch is None else scratch.copy_(elements)
        if self.is_offset:
            return wire ^ _LOWEST
        return wire

    def fold(self, rows: Sequence[Tensor]) -> Tensor:
        """Reduce what has come from the ranks, in their order."""
        return functools.reduce(_FOLDS[self.kind], rows)

    def from_wire(self, wire: Tensor, elements: Tensor, size: int) -> None:
        """Finish what was reduced over ``size`` ranks, and write it to ``elements``, of dtype ``view``."""
        if self.divides:
            wire.div_(size, rounding_mode=None if wire.is_floating_point() else "trunc")
        if self.is_offset:
            wire = wire ^ _LOWEST
        if elements.data_ptr() != wire.data_ptr():
            elements.copy_(wire)


@functools.cache
def reduction_of(dtype: torch.dtype, kind: Any, known: frozenset[torch.dtype]) -> WireReduction:
    """The reduction for a dtype and an operation (``ReduceOp.op``), over a wire that computes with ``known`` dtypes.

    Raises:
        TypeError: The operation means nothing for this dtype, such as bits of floating-point numbers.
    """
    view, base = _defined(dtype, kind)
    is_offset = False
    if view is torch.uint64 and view not in known:
        view, is_offset = torch.int64, base in (_Kind.MIN, _Kind.MAX)
    if view in known or view in _COMPLEX:
        wire = view
    else:
        wire = _WIDER.get(view, torch.complex64 if view.is_complex else torch.float32)
    return WireReduction(view, wire, base, kind == _Kind.AVG, is_offset, wire in known)


def _defined(dtype: torch.dtype, kind: Any) -> tuple[torch.dtype, Any]:
    """The dtype that memory is read as, and the operation on its elements."""
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
        return torch.uint8, _BOOL_KINDS[kind]
    return (_REAL.get(dtype, dtype), _Kind.SUM) if is_sum else (dtype, kind)
