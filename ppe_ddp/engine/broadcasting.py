"""Calls a broadcast function on tensors, once for each dtype and device, and checks that it keeps its contract."""

from __future__ import annotations

from functools import partial
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
    from collections.abc import Iterable

    from torch import Tensor

    from ppe_ddp.contracts import BroadcastFunction
    from ppe_ddp.engine.completion import Steps
    from ppe_ddp.engine.groups import Groups


def broadcast_all(function: BroadcastFunction, tensors: Iterable[Tensor], groups: Groups, *, source: int = 0) -> None:
    """Overwrite ``tensors`` by those of one rank, on all ranks. All must call this with the same list.

    Args:
        function: Does the broadcast; a function of the user's knows no other source than the group's rank 0.
        tensors: Of any dtypes and devices; changed in place.
        groups: The process groups to communicate in.
        source: The rank of the group whose tensors are sent.

    Raises:
        FunctionError: The function returned something that cannot be waited for.
        PeerAbortedError: It has failed on another rank.
        CommunicationError: Our own function failed to communicate, or a rank is gone.
    """
    try:
        with torch.no_grad():
            run(broadcasting(function, tensors, groups, source=source))
        groups.await_start()
    except Exception as error:
        instead = groups.fail(error, START)
        if instead is None:
            raise
        raise instead from error


def broadcasting(function: BroadcastFunction, tensors: Iterable[Tensor], groups: Groups, *, source: int = 0) -> Steps:
    """:func:`broadcast_all` as a generator that yields before it waits."""
    try:
        send = partial(broadcast, source=source) if function is broadcast else function
        pending = [(send(kind, groups.buckets), kind[0].device) for kind in _by_kind(tensors)]
        for work, device in pending:
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
        if function is broadcast and isinstance(error, RuntimeError) and not isinstance(error, PeerAbortedError):
            raise CommunicationError(
                f"rank {groups.rank}: broadcasting from rank {source} failed: {error}. An error or a crash on "
                "another rank ends here: look for the first traceback of all ranks."
            ) from error
        annotate(error, f"in broadcast_function {name_of(function)} on rank {groups.rank}")
        raise


def _by_kind(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Tensors grouped by dtype and device, in the order in which the kinds come along."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        local = local_tensor(tensor).detach()
        kinds.setdefault((local.dtype, local.device), []).append(local)
    return list(kinds.values())
