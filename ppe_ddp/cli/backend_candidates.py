"""Lists the backends that can be made here, and why others cannot, without making one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ppe_ddp.backends.cupy_nccl.nccl_version import NCCL_OF_SHARED_DEVICES, torch_nccl

if TYPE_CHECKING:
    from ppe_ddp.cli.libraries import CupyLibrary, MpiLibrary

__all__ = ["Candidate", "candidates", "many_ranks_a_device"]


@dataclass(frozen=True)
class Candidate:
    """A backend that this library can train over.

    Attributes:
        name: As ``init_process_group`` takes it.
        device: Whose tensors it is for: "cpu" or "cuda".
        missing: Why it cannot be made here; empty where it can.
        remedy: What to do about that.
    """

    name: str
    device: str
    missing: str = ""
    remedy: str = ""


def candidates(mpi: MpiLibrary, cupy: CupyLibrary) -> tuple[Candidate, ...]:
    """All backends, those first that need least."""
    return (_gloo(), _mpi4py(mpi), _nccl(), _cupy_nccl(cupy))


def many_ranks_a_device() -> bool:
    """Whether torch's NCCL takes several ranks on one GPU, where it is told to."""
    return (torch_nccl() or 0) >= NCCL_OF_SHARED_DEVICES


def _gloo() -> Candidate:
    if dist.is_gloo_available():
        return Candidate("gloo", "cpu")
    return Candidate("gloo", "cpu", "this build of torch has no gloo", "install a torch that is built with gloo")


def _mpi4py(mpi: MpiLibrary) -> Candidate:
    if mpi.library is None:
        what = "mpi4py is not installed" if mpi.mpi4py is None else f"mpi4py finds no MPI library ({mpi.problem})"
        return Candidate("mpi4py", "cpu", what, 'pip install "ppe-ddp[mpi]"')
    if mpi.mpirun is None:
        remedy = f'put the mpirun of {mpi.library} on PATH, or pip install "ppe-ddp[mpi]"'
        return Candidate("mpi4py", "cpu", "there is no mpirun, which starts its ranks", remedy)
    return Candidate("mpi4py", "cpu")


def _nccl() -> Candidate:
    missing, remedy = _without_cuda()
    if not missing and not dist.is_nccl_available():
        missing, remedy = "this build of torch has no NCCL", "install a torch for CUDA on Linux"
    return Candidate("nccl", "cuda", missing, remedy)


def _cupy_nccl(cupy: CupyLibrary) -> Candidate:
    missing, remedy = _without_cuda()
    extra = "cupy12" if (torch.version.cuda or "13").startswith("12") else "cupy13"
    if cupy.cupy is None:
        absent = "No module named 'cupy'" in cupy.problem
        also = "CuPy is not installed" if absent else f"CuPy cannot be imported ({cupy.problem})"
        also_remedy = f'pip install "ppe-ddp[{extra}]"'
    elif not missing and cupy.nccl is None:
        also = f"CuPy {cupy.cupy} finds no NCCL" + (f" ({cupy.problem})" if cupy.problem else "")
        also_remedy = "install a torch for CUDA, which brings NCCL, and import it before CuPy"
    elif cupy.files > 1:
        also = "torch and CuPy load two different NCCLs, which get in each other's way"
        also_remedy = f'install the CuPy that fits torch: pip install "ppe-ddp[{extra}]"'
    else:
        also = also_remedy = ""
    return Candidate("cupy_nccl", "cuda", _both(missing, also), _both(remedy, also_remedy))


def _without_cuda() -> tuple[str, str]:
    if torch.version.cuda is None:
        return "this build of torch is without CUDA", "install a torch for CUDA, on a machine with an NVIDIA GPU"
    if not torch.cuda.is_available():
        version = f"see nvidia-smi, whose CUDA version must be of torch's number ({torch.version.cuda}) or above"
        return "no CUDA device is visible", f"{version}, and CUDA_VISIBLE_DEVICES"
    return "", ""


def _both(first: str, second: str) -> str:
    return "; ".join(filter(None, (first, second)))
