"""The NCCL that torch calls in this process, and its version.

What `torch.cuda.nccl.version()` tells is the version that torch was compiled with. The library that is loaded may be a
newer one: pip lets users upgrade it apart from torch, for example to let ranks share a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from pathlib import Path

import torch
from torch import distributed as dist

__all__ = [
    "NCCL_OF_SHARED_DEVICES",
    "SHARE_DEVICES",
    "loaded_files",
    "torch_nccl",
    "torch_nccl_text",
    "version_text",
]

SHARE_DEVICES = "NCCL_MULTI_RANK_GPU_ENABLE"
"""The variable that lets several ranks share a GPU, where it is 1."""

NCCL_OF_SHARED_DEVICES = 23000
"""The first version that knows it; experimental."""


def torch_nccl() -> int | None:
    """The version of the NCCL that torch calls, as ``ncclGetVersion`` counts: 22707; None where torch has none.

    Ask before CuPy is imported, which may load another one.
    """
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
    """:func:`torch_nccl` as people write it; None where torch has none."""
    number = torch_nccl()
    return None if number is None else version_text(number)


def loaded_files() -> tuple[str, ...]:
    """The libnccl files that this process has loaded; none where NCCL is a part of torch itself."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return ()
    return tuple(sorted(set(re.findall(r"/\S*libnccl\.so\S*", maps))))


def version_text(number: int) -> str:
    """NCCL's number of a version as people write it: 22707 is 2.27.7."""
    # Until 2.8 the places were of one digit.
    major, rest = divmod(number, 10000) if number >= 10000 else divmod(number, 1000)
    return f"{major}.{rest // 100}.{rest % 100}"
