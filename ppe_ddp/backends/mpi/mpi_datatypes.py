"""MPI datatypes, operations and buffers for torch's dtypes, reductions and tensors.

Apart from the collectives because it is where wrong numbers would come from: MPI knows no bfloat16, some MPIs no
float16, and none complains about a wrong datatype.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from mpi4py import MPI
from torch.distributed import ReduceOp

from ppe_ddp.backends.process_group.reduction_rules import reduction_rule

Buffer = tuple[MPI.buffer, int, MPI.Datatype]

_DATATYPES = {
    torch.uint8: MPI.UINT8_T,
    torch.uint16: MPI.UINT16_T,
    torch.uint32: MPI.UINT32_T,
    torch.uint64: MPI.UINT64_T,
    torch.int8: MPI.INT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.complex64: MPI.C_FLOAT_COMPLEX,
    torch.complex128: MPI.C_DOUBLE_COMPLEX,
}
_Kind: Any = ReduceOp.RedOpType
_OPS = {
    _Kind.SUM: MPI.SUM,
    _Kind.PRODUCT: MPI.PROD,
    _Kind.MIN: MPI.MIN,
    _Kind.MAX: MPI.MAX,
    _Kind.BAND: MPI.BAND,
    _Kind.BOR: MPI.BOR,
    _Kind.BXOR: MPI.BXOR,
}


@dataclass(frozen=True)
class MpiReduction:
    """How MPI reduces the elements of one dtype by one operation.

    Attributes:
        view: The dtype that a flat tensor's memory is read as: bool as uint8, a sum of complex numbers as real ones.
        wire: The dtype in which the numbers travel and are summed; where it is not ``view``, they are converted, and
            rounded once at the end.
        datatype: ``wire`` in MPI's terms.
        op: The operation in MPI's terms.
        divides: Whether the result is divided by the number of ranks: towards zero for integers, as in NCCL.
        is_direct: Whether MPI can work on the tensor's own memory with nothing to do before or after.
    """

    view: torch.dtype
    wire: torch.dtype
    datatype: MPI.Datatype
    op: MPI.Op
    divides: bool
    is_direct: bool


@functools.cache
def reduction_of(dtype: torch.dtype, kind: Any) -> MpiReduction:
    """The reduction for a dtype and an operation (``ReduceOp.op``).

    Raises:
        TypeError: The operation means nothing for this dtype, such as bits of floating-point numbers.
    """
    rule = reduction_rule(dtype, kind)
    view = rule.view
    wire = view if view in _DATATYPES else torch.complex64 if view.is_complex else torch.float32
    # as many elements as the tensor has, too: a complex number is two
    is_direct = wire is view and view.itemsize == dtype.itemsize and not (rule.divides or rule.premultiplies)
    return MpiReduction(view, wire, _DATATYPES[wire], _OPS[rule.kind], rule.divides, is_direct)


def typed_buffer(tensor: torch.Tensor, datatype: MPI.Datatype) -> Buffer:
    """The memory of a contiguous tensor as ``numel`` numbers of an MPI datatype; it must outlive the MPI call."""
    _synchronize_cuda(tensor)
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes), tensor.numel(), datatype


def byte_buffer(tensor: torch.Tensor) -> Buffer:
    """The memory of a contiguous tensor as plain bytes: for what is moved and not computed with."""
    _synchronize_cuda(tensor)
    nbytes = tensor.nbytes
    return MPI.buffer.fromaddress(tensor.data_ptr(), nbytes), nbytes, MPI.BYTE


def _synchronize_cuda(tensor: torch.Tensor) -> None:
    """A GPU-aware MPI does not know the streams: what writes the tensor has to have ended."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
