"""The offset between the clocks of two ranks, by ping-pong: the fastest of several round trips tells most.

    rank 0   sends at a                            receives at c
    rank r                reads its own clock: b

Were both ways equally long, b were (a + c) / 2 by rank 0's clock. They differ by no more than the round trip, so the
error is at most half of it.
"""

from __future__ import annotations

import uuid
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter_ns
from typing import TYPE_CHECKING

import torch
from torch import distributed as dist

from ppe_ddp.backends.group_internals import device_types

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch.distributed import ProcessGroup

_ROUND_TRIPS = 16


@dataclass(frozen=True)
class ClockOffset:
    """How this rank's clock compares with that of rank 0.

    Attributes:
        job: The same text on all ranks that were compared together, and on no others.
        rank: This process in the group.
        world_size: The size of the group.
        offset_ns: What to subtract from this rank's times to get those of rank 0.
        error_ns: By how much that may be wrong.
    """

    job: str
    rank: int
    world_size: int
    offset_ns: int = 0
    error_ns: int = 0


def alone() -> ClockOffset:
    """That of a process which compares its clock with no other."""
    return ClockOffset(uuid.uuid4().hex, 0, 1)


def measure_offset(group: ProcessGroup) -> ClockOffset:
    """Compare the clocks of all ranks of ``group`` with that of its rank 0; all of them must call this together."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    job = uuid.uuid4()
    if world_size == 1:
        return ClockOffset(job.hex, 0, 1)
    with _serving_cpu(group) as messages:
        if rank == 0:
            for peer in range(1, world_size):
                offset, error = _offset_of(peer, messages)
                head, tail = job.int >> 64, job.int & (2**64 - 1)
                dist.send(_message(offset, error, head - 2**63, tail - 2**63), group=messages, group_dst=peer)
            return ClockOffset(job.hex, 0, world_size)
        for _ in range(_ROUND_TRIPS):
            dist.recv(_message(0), group=messages, group_src=0)
            dist.send(_message(perf_counter_ns()), group=messages, group_dst=0)
        answer = _message(0, 0, 0, 0)
        dist.recv(answer, group=messages, group_src=0)
    offset, error, head, tail = answer.tolist()
    name = uuid.UUID(int=((head + 2**63) << 64) + tail + 2**63).hex
    return ClockOffset(name, rank, world_size, offset, error)


def _offset_of(peer: int, group: ProcessGroup) -> tuple[int, int]:
    """The offset of the clock of ``peer``, which answers, and the error."""
    reply = _message(0)
    trips = []
    for _ in range(_ROUND_TRIPS):
        begin = perf_counter_ns()
        dist.send(_message(0), group=group, group_dst=peer)
        dist.recv(reply, group=group, group_src=peer)
        end = perf_counter_ns()
        trips.append((end - begin, int(reply[0]) - (begin + end) // 2))
    fastest, offset = min(trips)
    return offset, -(-fastest // 2)


def _message(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


@contextmanager
def _serving_cpu(group: ProcessGroup) -> Generator[ProcessGroup, None, None]:
    """``group``, or one of the same ranks for CPU tensors."""
    if "cpu" in device_types(group):
        yield group
        return
    other = dist.new_group(dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True)
    try:
        yield other
    finally:
        dist.destroy_process_group(other)
