"""CuPy's NCCL: loading it, and NCCL's numbers for torch's dtypes and reductions.

The numbers stand here because no CuPy has names for float8, and older ones have none for bfloat16 and the average.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch.distributed import ReduceOp

from ppe_ddp.backends.cupy_nccl.nccl_version import torch_nccl, version_text
from ppe_ddp.errors import UnusableError

__all__ = ["BYTE", "load_nccl", "reduction_of"]

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
_OPS = {_Kind.SUM: _SUM, _Kind.AVG: _AVERAGE, _Kind.PRODUCT: _PRODUCT, _Kind.MAX: _MAX, _Kind.MIN: _MIN}
# As in torch's own arithmetic: True + True is True, True * False is False.
_BOOL_OPS = dict.fromkeys((_Kind.SUM, _Kind.MAX, _Kind.BOR), _MAX) | dict.fromkeys(
    (_Kind.PRODUCT, _Kind.MIN, _Kind.BAND), _MIN
)


def load_nccl() -> Any:
    """Load ``cupy.cuda.nccl``; torch has been imported before, so that CuPy finds torch's NCCL.

    Raises:
        ImportError: CuPy is not installed, or finds no NCCL; the message names the extra to install.
        UnusableError: There is no CUDA device here.
    """
    extra = "cupy12" if (torch.version.cuda or "").startswith("12") else "cupy13"
    install = f'pip install "ppe-ddp[{extra}]"'
    if not torch.cuda.is_available():
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        raise UnusableError(
            f"the backend 'cupy_nccl' needs an NVIDIA GPU that torch can use: this torch ({torch.__version__}) is "
            f"built {built}, and no CUDA device is visible. On a machine with one, install a torch for CUDA, and "
            f"CuPy by: {install} (cupy12 for CUDA 12, cupy13 for CUDA 13)"
        )
    torchs = torch_nccl()  # before CuPy is imported, which may load another one
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        raise ImportError(
            f"the backend 'cupy_nccl' needs CuPy, and loading it failed ({error}); install it by: {install}"
        ) from error
    if not nccl.available:
        raise ImportError(
            "the backend 'cupy_nccl' needs the NCCL that comes with torch for CUDA, and CuPy has not found one; see "
            f"`python -m ppe_ddp env`; a CuPy that fits this torch comes by: {install}"
        )
    cupys = nccl.get_version()
    if torchs is not None and torchs != cupys:
        warnings.warn(
            f"torch calls NCCL {version_text(torchs)}, and CuPy calls {version_text(cupys)}: two NCCLs in one process "
            "can get in each other's way. Import torch before CuPy; see `python -m ppe_ddp env`",
            RuntimeWarning,
            stacklevel=2,
        )
    return nccl


@functools.cache
def reduction_of(dtype: torch.dtype, kind: Any, version: int) -> tuple[int, int, int]:
    """Look up how NCCL reduces tensors of a dtype.

    Args:
        dtype: The tensors' dtype.
        kind: The operation, ``ReduceOp.op``.
        version: NCCL's version, as ``ncclGetVersion`` counts: 22707.

    Returns:
        NCCL's number of the datatype (uint8 for bool, real numbers for the sum of complex ones), the bytes of one
        such number, and NCCL's number of the operation.

    Raises:
        TypeError: NCCL has no such reduction; the message says what would do.
    """
    op = (_BOOL_OPS if dtype is torch.bool else _OPS).get(kind)
    sums = kind in (_Kind.SUM, _Kind.AVG)
    view = torch.uint8 if dtype is torch.bool else _REAL.get(dtype, dtype) if sums else dtype
    what = f"ReduceOp.{kind.name} of {dtype} tensors"
    if view not in _DATATYPES or op is None:
        raise TypeError(f"NCCL has no {what}; convert them, or reduce them on the CPU")
    datatype, first = _DATATYPES[view]
    if op == _AVERAGE:
        first = max(first, _FIRST_WITH_AVERAGE)
    if version < first:
        raise TypeError(f"this NCCL ({version}) has no {what}, which came with {first}; use a newer CuPy and torch")
    return datatype, view.itemsize, op
