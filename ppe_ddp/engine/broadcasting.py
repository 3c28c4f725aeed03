"""Calls a broadcast function on tensors, once for each dtype and device, and checks that it keeps its contract."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ppe_ddp.contracts import is_waitable, probe
from ppe_ddp.engine.completion import run
from ppe_ddp.engine.distributed_tensors import local_tensor
from ppe_ddp.engine.failures import START, awaited_once
from ppe_ddp.engine.reduction import annotate
from ppe_ddp.errors import CommunicationError, FunctionError, PeerAbortedError
from ppe_ddp.functions import broadcast, name_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ppe_ddp.contracts import BroadcastFunction
    from ppe_ddp.engine.completion import Steps
    from ppe_ddp.engine.groups import Groups


def broadcast_all(function: BroadcastFunction, tensors: Sequence[Tensor], groups: Groups) -> None:
    """Overwrite ``tensors`` by those of the group's rank 0, on all ranks. All must call this with the same list.

    Args:
        function: Does the broadcast.
        tensors: Of any dtypes and devices; changed in place.
        groups: The process groups to communicate in.

    Raises:
        FunctionError: The function returned something that cannot be waited for.
        PeerAbortedError: It has failed on another rank.
        CommunicationError: Our own function failed to communicate, or a rank is gone.
    """
    try:
        with torch.no_grad():
            run(broadcasting(function, tensors, groups, sources=[0] * len(tensors)))
        groups.await_start()
    except Exception as error:
        instead = groups.fail(error, START)
        if instead is None:
            raise
        raise instead from error


def broadcasting(
    function: BroadcastFunction, tensors: Sequence[Tensor], groups: Groups, *, sources: Sequence[int]
) -> Steps:
    """:func:`broadcast_all` as a generator that yields before it waits.

    Args:
        function: Broadcasts what rank 0 sends; it knows no other source, for which our own does it.
        tensors: As there.
        groups: As there.
        sources: The rank of the group that sends each of ``tensors``; the same on every rank.
    """
    used, source = function, 0
    try:
        pending = []
        for source, kind in _by_kind(tensors, sources):
            used = broadcast if source else function
            work = broadcast(kind, groups.buckets, source=source) if source else function(kind, groups.buckets)
            pending.append((used, source, work, kind[0].device))
        for message in pending:
            used, source, work, device = message
            if is_waitable(work):
                arriving = awaited_once(work, device)
                yield probe(arriving)
                groups.failures.wait(arriving, device)
            elif work is not None:
                raise FunctionError(
                    f"rank {groups.rank}: broadcast_function returned {type(work).__name__}; it must change the "
                    "tensors in place and return None, or a Work or Future to wait for"
                )
    except Exception as error:
        if used is broadcast and isinstance(error, RuntimeError) and not isinstance(error, PeerAbortedError):
            raise CommunicationError(
                f"rank {groups.rank}: broadcasting from rank {source} failed: {error}. An error or a crash on "
                "another rank ends here: look for the first traceback of all ranks."
            ) from error
        annotate(error, f"in broadcast_function {name_of(used)} on rank {groups.rank}")
        raise


def _by_kind(tensors: Sequence[Tensor], sources: Sequence[int]) -> list[tuple[int, list[Tensor]]]:
    """Tensors grouped by source, dtype and device, in the order in which the kinds come along; each with its source."""
    kinds: dict[tuple[int, torch.dtype, torch.device], list[Tensor]] = {}
    for tensor, source in zip(tensors, sources, strict=True):
        local = local_tensor(tensor).detach()
        kinds.setdefault((source, local.dtype, local.device), []).append(local)
    return [(source, kind) for (source, _, _), kind in kinds.items()]
