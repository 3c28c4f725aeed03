"""Loads CuPy's NCCL, and says what to install where it cannot be loaded."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, cast

import torch

from ppe_ddp.backends.cupy_nccl.nccl_version import torch_nccl, version_text
from ppe_ddp.errors import UnusableError

if TYPE_CHECKING:
    from ppe_ddp.backends.cupy_nccl.nccl_communicator import NcclLibrary

__all__ = ["load_nccl"]


def load_nccl() -> NcclLibrary:
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
    torchs = torch_nccl()
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
    _warn_of_two_libraries(torchs, nccl.get_version())
    return cast("NcclLibrary", nccl)


def _warn_of_two_libraries(torchs: int | None, cupys: int) -> None:
    if torchs is not None and torchs != cupys:
        warnings.warn(
            f"torch calls NCCL {version_text(torchs)}, and CuPy calls {version_text(cupys)}: two NCCLs in one process "
            "can get in each other's way. Import torch before CuPy; see `python -m ppe_ddp env`",
            RuntimeWarning,
            stacklevel=3,
        )
