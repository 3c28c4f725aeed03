"""NCCL datatypes and operations for torch's dtypes and reductions.

NCCL's own numbers stand here: no CuPy has names for float8, and older ones have none for bfloat16 and the average.
Apart from the collectives because it is where wrong numbers would come from.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ReduceOp

__all__ = ["BYTE", "NcclReduction", "reduction_of"]

BYTE = 1
"""NCCL's number of uint8: what is moved and not computed with goes as bytes."""

# ncclDataType_t, and from which version of NCCL on.
_DATATYPES = {
    torch.int8: (0, 0),
    torch.uint8: (BYTE, 0),
    torch.int32: (2, 0),
    torch.uint32: (3, 0),
    torch.int64: (4, 0),
    torch.uint64: (5, 0),
    torch.float16: (6, 0),
    torch.float32: (7, 0),
    torch.float64: (8, 0),
    torch.bfloat16: (9, 21000),
    torch.float8_e4m3fn: (10, 22400),
    torch.float8_e5m2: (11, 22400),
}
_REAL = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}

_Kind: Any = ReduceOp.RedOpType
_SUM, _PRODUCT, _MAX, _MIN, _AVERAGE = range(5)  # ncclRedOp_t
_FIRST_WITH_AVERAGE = 21000
_OPS = {
    _Kind.SUM: _SUM,
    _Kind.PREMUL_SUM: _SUM,
    _Kind.AVG: _AVERAGE,
    _Kind.PRODUCT: _PRODUCT,
    _Kind.MAX: _MAX,
    _Kind.MIN: _MIN,
}
# As in torch's own arithmetic: True + True is True, True * False is False.
_BOOL_OPS = {
    _Kind.SUM: _MAX,
    _Kind.MAX: _MAX,
    _Kind.BOR: _MAX,
    _Kind.PRODUCT: _MIN,
    _Kind.MIN: _MIN,
    _Kind.BAND: _MIN,
}
_SUMS = (_Kind.SUM, _Kind.AVG, _Kind.PREMUL_SUM)


@dataclass(frozen=True)
class NcclReduction:
    """How NCCL reduces the elements of one dtype by one operation.

    Attributes:
        datatype: What NCCL is told that the memory holds: for bool uint8, for a sum of complex numbers real ones.
        itemsize: Bytes of one such number.
        op: The operation in NCCL's terms.
        scales: Whether each rank's numbers are multiplied by a factor of its own before.
    """

    datatype: int
    itemsize: int
    op: int
    scales: bool


@functools.cache
def reduction_of(dtype: torch.dtype, kind: Any, version: int) -> NcclReduction:
    """The reduction for a dtype and an operation (``ReduceOp.op``).

    Args:
        dtype: Of the tensor.
        kind: ``ReduceOp.op``.
        version: NCCL's, as ``ncclGetVersion`` counts: 22707.

    Raises:
        TypeError: NCCL has no such reduction; the message says what would do.
    """
    op = (_BOOL_OPS if dtype is torch.bool else _OPS).get(kind)
    view = torch.uint8 if dtype is torch.bool else _REAL.get(dtype, dtype) if kind in _SUMS else dtype
    what = f"ReduceOp.{kind.name} of {dtype} tensors"
    if view not in _DATATYPES or op is None:
        raise TypeError(f"NCCL has no {what}; convert them, or reduce them on the CPU")
    scales = kind == _Kind.PREMUL_SUM
    if scales and not (dtype.is_complex or (dtype.is_floating_point and dtype.itemsize > 1)):
        raise TypeError(f"there is no {what}: the factor is a floating-point number; convert them")
    number, first = _DATATYPES[view]
    if op == _AVERAGE:
        first = max(first, _FIRST_WITH_AVERAGE)
    if version < first:
        raise TypeError(f"this NCCL ({version}) has no {what}, which came with {first}; use a newer CuPy and torch")
    return NcclReduction(number, view.itemsize, op, scales)
