"""How gloo reduces each dtype: apart from the collectives because it is where wrong numbers would come from.

gloo knows few dtypes, sums bools as bytes, and rounds halves at every step of its ring.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from ppe_ddp.backends.group_internals import premul_factor
from ppe_ddp.backends.process_group.reduction_rules import reduction_rule

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_Kind: Any = ReduceOp.RedOpType
_AS_THEY_ARE = (torch.float32, torch.float64, torch.uint8, torch.int8, torch.int32, torch.int64)
_WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
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
class GlooReduction:
    """How the elements of one dtype are reduced by one operation.

    Attributes:
        view: The dtype that a flat tensor's memory is read as.
        wire: The dtype in which the numbers travel; where it is not ``view``, they are converted, and rounded once.
        kind: What is done with those.
        divides: Whether the result is divided by the number of ranks.
        premultiplies: Whether each rank's numbers are multiplied before.
        is_offset: Whether unsigned numbers travel as signed ones of the same order.
    """

    view: torch.dtype
    wire: torch.dtype
    kind: Any
    divides: bool
    premultiplies: bool
    is_offset: bool

    @property
    def is_known_to_gloo(self) -> bool:
        """Whether gloo can do it."""
        return not self.wire.is_complex

    def to_wire(self, flat: Tensor, op: Any) -> Tensor:
        """What travels, made of a contiguous 1-D tensor: its own memory where nothing has to be done before."""
        elements = flat.view(self.view)
        wire = elements.to(self.wire)
        if self.premultiplies:
            return wire * premul_factor(op, wire.device)
        return wire ^ _LOWEST if self.is_offset else wire

    def fold(self, rows: Sequence[Tensor]) -> Tensor:
        """Reduce what has come from the ranks."""
        return functools.reduce(_FOLDS[self.kind], rows)

    def from_wire(self, wire: Tensor, flat: Tensor, size: int) -> None:
        """Finish what was reduced over ``size`` ranks, and write it to ``flat``, a contiguous 1-D tensor."""
        if self.divides:
            wire.div_(size, rounding_mode=None if wire.is_floating_point() else "trunc")
        if self.is_offset:
            wire = wire ^ _LOWEST
        elements = flat.view(self.view)
        if elements.data_ptr() != wire.data_ptr():
            elements.copy_(wire)


@functools.cache
def gloo_reduction(dtype: torch.dtype, kind: Any) -> GlooReduction:
    """The reduction for a dtype and an operation (``ReduceOp.op``).

    Raises:
        TypeError: The operation means nothing for this dtype, such as bits of floating-point numbers.
    """
    rule = reduction_rule(dtype, kind)
    view = torch.int64 if rule.view is torch.uint64 else rule.view
    is_offset = rule.view is torch.uint64 and rule.kind in (_Kind.MIN, _Kind.MAX)
    if view in _AS_THEY_ARE or view in (torch.complex64, torch.complex128):
        wire = view
    else:
        wire = _WIDER.get(view, torch.complex64 if view.is_complex else torch.float32)
    return GlooReduction(view, wire, rule.kind, rule.divides, rule.premultiplies, is_offset)
