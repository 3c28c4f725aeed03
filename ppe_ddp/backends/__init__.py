"""Backends for torch.distributed; importing this package registers them.

Registering costs nothing. The libraries of a backend (mpi4py, an MPI library, CuPy) are loaded when the first group
over it is made. So a program that does not use a backend does not need its libraries.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import Backend, ProcessGroup
from torch.distributed.rendezvous import register_rendezvous_handler

from ppe_ddp.backends.group_internals import Store

__all__ = ["register"]


def register() -> None:
    """Register the backends ``mpi4py``, ``shm`` and ``cupy_nccl``, and the init method ``mpi://``, with torch.

    A second call changes nothing.
    """
    if "mpi4py" not in Backend.backend_list:
        Backend.register_backend("mpi4py", _make_mpi_group, extended_api=True, devices=["cpu", "cuda"])
    if "shm" not in Backend.backend_list:
        Backend.register_backend("shm", _make_shm_group, extended_api=True, devices=["cpu"])
    if "cupy_nccl" not in Backend.backend_list:
        Backend.register_backend("cupy_nccl", _make_cupy_group, extended_api=True, devices=["cuda"])
    with suppress(RuntimeError):  # there is one already
        register_rendezvous_handler("mpi", _mpi_rendezvous)


def _make_mpi_group(arguments: Any, options: Any) -> ProcessGroup:
    _import_mpi()
    from ppe_ddp.backends.mpi.mpi_group import make_group

    return make_group(arguments, options)


def _make_shm_group(arguments: Any, options: Any) -> ProcessGroup:
    from ppe_ddp.backends.shm.shm_group import make_group

    return make_group(arguments, options)


def _make_cupy_group(arguments: Any, options: Any) -> ProcessGroup:
    from ppe_ddp.backends.cupy_nccl.nccl_group import make_group
    from ppe_ddp.backends.cupy_nccl.nccl_library import load_nccl

    if options is not None:
        raise TypeError(f"the backend cupy_nccl takes no pg_options, but it got {type(options).__name__}")
    return make_group(arguments, load_nccl())


def _mpi_rendezvous(url: str, timeout: timedelta | None = None, **_: Any) -> Iterator[tuple[Store, int, int]]:
    _import_mpi()
    from ppe_ddp.backends.mpi.mpi_job import rendezvous

    yield rendezvous(url, timeout)


def _import_mpi() -> None:
    try:
        from mpi4py import MPI  # noqa: F401
    except (ImportError, RuntimeError) as error:
        # mpi4py raises RuntimeError if it finds no MPI library.
        raise ImportError(
            f"the backend 'mpi4py' needs mpi4py and an MPI library, and loading them failed ({error}); "
            'install both by: pip install "ppe-ddp[mpi]"'
        ) from error


register()
