"""Backends for torch.distributed; importing this package registers them.

Registering costs nothing. The libraries of a backend (mpi4py, an MPI library, CuPy) are loaded when the first group
over it is made. So a program that does not use a backend does not need its libraries.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

from torch.distributed import Backend
from torch.distributed.rendezvous import register_rendezvous_handler

from ppe_ddp.backends.group_internals import Store
from ppe_ddp.torch_internals import uncompiled_hook

__all__ = ["register"]

_MODULES = {
    "mpi4py": ("mpi.mpi_group", ["cpu", "cuda"]),
    "shm": ("shm.shm_group", ["cpu"]),
    "cupy_nccl": ("cupy_nccl.nccl_group", ["cuda"]),
}
"""The module that makes the groups of each backend, and the devices of their tensors."""


def register() -> None:
    """Register the backends ``mpi4py``, ``shm`` and ``cupy_nccl``, and the init method ``mpi://``, with torch.

    A second call changes nothing.
    """
    for name, (module, devices) in _MODULES.items():
        if name not in Backend.backend_list:
            Backend.register_backend(name, partial(_make_group, module), extended_api=True, devices=devices)
    with suppress(RuntimeError):  # there is one already
        register_rendezvous_handler("mpi", _mpi_rendezvous)


@uncompiled_hook  # in what is compiled, torch makes groups with Dynamo active
def _make_group(module: str, arguments: Any, options: Any) -> Any:
    if module.startswith("mpi."):
        _import_mpi()
    return importlib.import_module(f"ppe_ddp.backends.{module}").make_group(arguments, options)


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
