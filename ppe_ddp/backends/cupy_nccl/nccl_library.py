"""NCCL: loads CuPy's, tells the versions of torch's and CuPy's, and has NCCL's numbers for dtypes and reductions.

`torch.cuda.nccl.version()` is the version that torch was compiled with; the loaded library may be newer, as pip can
upgrade it without torch, for example to let ranks share a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import ReduceOp

from ppe_ddp.errors import UnusableError

SHARE_DEVICES = "NCCL_MULTI_RANK_GPU_ENABLE"
"""The environment variable that lets several ranks share a GPU if it is 1; experimental."""

NCCL_OF_SHARED_DEVICES = 23000
"""The first version of NCCL that reads it."""

BYTE = 1
"""NCCL's number of uint8, as which all is sent that is not reduced."""

# ncclDataType_t; float8 came with NCCL 2.24, and torch 2.9 with 2.27.
_DATATYPES = {
    torch.int8: 0,
    torch.uint8: BYTE,
    torch.int32: 2,
    torch.uint32: 3,
    torch.int64: 4,
    torch.uint64: 5,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
    torch.float8_e4m3fn: 10,
    torch.float8_e5m2: 11,
}

_Kind: Any = ReduceOp.RedOpType
_SUM, _PRODUCT, _MAX, _MIN, _AVERAGE = range(5)  # ncclRedOp_t
_OPS = {_Kind.SUM: _SUM, _Kind.AVG: _AVERAGE, _Kind.PRODUCT: _PRODUCT, _Kind.MAX: _MAX, _Kind.MIN: _MIN}
# As in torch's own arithmetic: True + True is True, True * False is False.
_BOOL_OPS = dict.fromkeys((_Kind.SUM, _Kind.MAX, _Kind.BOR), _MAX) | dict.fromkeys(
    (_Kind.PRODUCT, _Kind.MIN, _Kind.BAND), _MIN
)


def load_nccl() -> Any:
    """Load ``cupy.cuda.nccl``, which finds torch's NCCL, as torch was imported before.

    Raises:
        ImportError: CuPy is not installed, or finds no NCCL; the message names the extra to install.
        UnusableError: There is no CUDA device.
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
def reduction_of(dtype: torch.dtype, kind: Any) -> tuple[int, int, int]:
    """NCCL's datatype, the bytes of an element, and NCCL's operation, for a reduction (``ReduceOp.op``) of a dtype."""
    op = (_BOOL_OPS if dtype is torch.bool else _OPS).get(kind)
    sums = kind in (_Kind.SUM, _Kind.AVG)
    view = torch.uint8 if dtype is torch.bool else dtype.to_real() if sums else dtype
    if view not in _DATATYPES or op is None:
        raise TypeError(f"NCCL has no ReduceOp.{kind.name} of {dtype} tensors; convert them, or reduce them on the CPU")
    return _DATATYPES[view], view.itemsize, op


def torch_nccl() -> int | None:
    """The version of torch's NCCL, such as 22707, or None; call it before importing CuPy, which may load another."""
    if not dist.is_nccl_available():
        return None
    files = loaded_files()
    if len(files) == 1:
        number = ctypes.c_int()
        with contextlib.suppress(OSError, AttributeError):
            if ctypes.CDLL(files[0]).ncclGetVersion(ctypes.byref(number)) == 0:
                return number.value
    major, minor, patch = torch.cuda.nccl.version()[:3]
    return int(major * 10000 + minor * 100 + patch)


def torch_nccl_text() -> str | None:
    """:func:`torch_nccl` as text, such as 2.27.7; None without NCCL."""
    number = torch_nccl()
    return None if number is None else version_text(number)


def loaded_files() -> tuple[str, ...]:
    """The libnccl files that this process has loaded; none if NCCL is linked into torch."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return ()
    return tuple(sorted(set(re.findall(r"/\S*libnccl\.so\S*", maps))))


def version_text(number: int) -> str:
    """NCCL's version number as text: 22707 is 2.27.7."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
