"""Ends process groups before Python ends: their threads must not need Python any more when it is gone.

A thread of gloo gives up an operation a moment after it was waited for. If Python is at its end by then, the thread is
killed where it asks for Python's lock, and C++ aborts the process: "terminate called without an active exception". The
results are all there, but the launcher reports a failure.
"""

from __future__ import annotations

from typing import Protocol

from torch import device
from torch import distributed as dist
from torch.distributed import ProcessGroup

from ppe_ddp.backends.group_internals import backend_for, device_types


class User(Protocol):
    """The object that communicates over such connections."""

    @property
    def is_running(self) -> bool:
        """Whether a collective may be under way, so that the connections must not be ended."""
        ...


def is_over_gloo(group: ProcessGroup) -> bool:
    """Whether ``group`` communicates over gloo alone."""
    return type(group) is ProcessGroup and all(
        isinstance(backend_for(group, device(kind)), dist.ProcessGroupGloo) for kind in device_types(group)
    )
