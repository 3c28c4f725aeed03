"""Gives the communicators of a group that all ranks have given up back to MPI, of which there are some two thousand.

    rank 0 has begun   all-reduce 7    all-reduce 8          8 is under way, and can neither be cancelled nor left
    rank 1 has begun   all-reduce 7                          makes 8 up, with numbers that nobody looks at
    both               wait for what is under way, receive the notices of giving up, free the communicator

Where that does not succeed, the communicator is left as it is, and never used again.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch
from mpi4py import MPI

from ppe_ddp.backends.mpi.nonblocking_calls import fit
from ppe_ddp.backends.process_group.progress_engine import progress_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from ppe_ddp.backends.mpi.mpi_waits import Waits
    from ppe_ddp.backends.mpi.nonblocking_calls import Call, NonblockingCalls

_SECONDS = 2.0  # for all ranks to make up what is missing

UnderWay = tuple[MPI.Request, tuple["Tensor", ...]]
"""A request with the memory that it reads or writes."""


@dataclass
class OpenCommunicator:
    """A communicator of a group that was given up.

    Attributes:
        calls: What this rank has begun in it.
        ranks: Of the group, in the order of the communicator.
        left: What was under way when the group was given up.
    """

    calls: NonblockingCalls
    ranks: Sequence[int]
    left: list[UnderWay] = field(default_factory=list)


def release(
    communicators: Mapping[str, OpenCommunicator], waits: Waits, exchange: Callable[[str, Any], list[Any]]
) -> None:
    """Free them; every rank of the group calls it, when all have given the group up.

    Args:
        communicators: By a name that is the same on all of its ranks; the first is that of the group. A rank that lacks
            one keeps it from being freed.
        waits: Of the group.
        exchange: Brings a word of each rank, under a name, to all.

    Raises:
        CommunicationError: Not all ranks have come.
    """
    with progress_engine(os.getpid()).lock:
        own = {name: one.calls.count for name, one in communicators.items()}
    counts: list[dict[str, int]] = []
    tellers: list[int] = []
    for rank, (has_told, count) in enumerate(exchange("begun", [waits.has_told, own])):
        counts.append(count)
        tellers += [rank] * has_told
    least = {name: min(one[name] for one in counts if name in one) for one in counts for name in one}
    missing: list[dict[str, list[Call]]] = [{} for _ in counts]
    if any(count > least[name] for one in counts for name, count in one.items()):
        missing = exchange("missing", {name: one.calls.since(least[name]) for name, one in communicators.items()})
    for place, (name, one) in enumerate(communicators.items()):
        begun = [missing[rank].get(name, []) for rank in one.ranks]
        wanted = [counts[rank].get(name, -1) - least[name] for rank in one.ranks]
        if [len(calls) for calls in begun] == wanted:
            _end(one, begun, waits, tellers if place == 0 else [])


def _end(one: OpenCommunicator, begun: Sequence[list[Call]], waits: Waits, tellers: Sequence[int]) -> None:
    """Bring what is under way in a communicator to its end and free it.

    Args:
        one: The communicator.
        begun: By its ranks, what each has begun that not all have.
        waits: Of its group.
        tellers: The ranks that have told the others that they have given the group up.
    """
    progress = progress_engine(os.getpid())
    steps = [
        {rank: calls[step] for rank, calls in enumerate(begun) if step < len(calls)}
        for step in range(max(map(len, begun)))
    ]
    if not all(fit(list(calls.values())) for calls in steps):
        return
    with progress.lock:
        # What is made up writes into memory that the user may still have.
        kept = [(tensor, tensor.clone()) for _, memory in one.left for tensor in memory]
        own = one.calls.comm.Get_rank()
        made_up = [one.calls.make_up(calls) for calls in steps[len(begun[own]) :]]
    under_way = [*one.left, *made_up]
    end = monotonic() + _SECONDS

    def is_over() -> bool:
        # of all of them, so that each moves
        return all([request.Test() for request, _ in under_way]) and waits.have_noticed(tellers)

    try:
        progress.wait_until(lambda: is_over() or monotonic() > end, lambda: None)
        if is_over():
            one.calls.comm.Free()
    except MPI.Exception:  # such as a message of another length: a rank had called something else
        pass
    finally:
        for request, memory in made_up:
            progress.keep(request, memory)
        with torch.no_grad():
            for tensor, content in kept:
                tensor.copy_(content)
