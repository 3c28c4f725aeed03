"""Who is slow: each rank's own time in a step, without what it waits for others, goes along in its vote.

    end of a synchronization to the next forward    data, optimizer and all else: a byte, on a logarithmic scale
    that forward to the end of backward             computing: another byte

Every rank gets the times of all. Times are those of the host: on GPUs, of launching the work.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from dataclasses import dataclass
from time import perf_counter_ns

import torch

logger = logging.getLogger("ppe_ddp")

NBYTES = 2
"""Of what a rank says."""
WINDOW = 20
"""Steps that are looked at."""
_SLOW = 1.2  # of the median
_MOST, _FEW = 17, 10  # steps of a window: ranks that are equally fast differ by chance, in half of them at most
_LEAST_MS = 1.0  # of a difference: less is not worth a word
_JUDGED_EVERY = 4
_PER_DOUBLING = 8
_DECODED = [math.nan, *(2 ** (code / _PER_DOUBLING) / 1e3 for code in range(255))]  # milliseconds
_MILLIS = torch.tensor(_DECODED)


@dataclass(frozen=True)
class RankTime:
    """How long one rank takes for a step, on average over the last 20, without waiting for others.

    Attributes:
        rank: The rank, in the wrapper's group.
        compute_ms: From its first forward to the end of its backward, in milliseconds; NaN where it had none.
        other_ms: From the end of the last synchronization to that forward: data loader, optimizer, and all else.
        is_slow: Whether it takes over 20 % longer than the median rank, by 1 ms or more, in nearly every step.
    """

    rank: int
    compute_ms: float
    other_ms: float
    is_slow: bool


class RankTimes:
    """The own times of all ranks in the last steps.

    Args:
        rank: This rank; rank 0 logs who is slow.
        world_size: How many there are.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._rows: deque[bytes] = deque(maxlen=WINDOW)
        self._has_slow: deque[bool] = deque(maxlen=WINDOW)  # of each row
        self._count = 0
        self._ended_at = self._forward_at = 0
        self._slow: set[int] = set()

    def begin_forward(self) -> None:
        """A forward begins."""
        if not self._forward_at:
            self._forward_at = perf_counter_ns()

    def end_step(self) -> None:
        """The synchronization is over, or given up."""
        self._ended_at, self._forward_at = perf_counter_ns(), 0

    def field(self, backward_at: int) -> bytes:
        """What this rank says in a vote, between zeros for the others.

        Args:
            backward_at: When its backward was over, by ``perf_counter_ns()``.
        """
        own = bytearray(NBYTES * self._world_size)
        if self._forward_at and self._ended_at:
            own[NBYTES * self._rank] = _code(backward_at - self._forward_at)
            own[NBYTES * self._rank + 1] = _code(self._forward_at - self._ended_at)
        return bytes(own)

    def note(self, field: bytes) -> None:
        """Take in the maxima of the ranks' fields; rank 0 logs who has become slow, or is so no more."""
        self._rows.append(field)
        self._count += 1
        if self._rank:
            return
        self._has_slow.append(_has_slow(field))
        if (self._slow or sum(self._has_slow) >= _MOST) and self._count % _JUDGED_EVERY == 0:
            self._judge()

    def _judge(self) -> None:
        times = self._times().sum(-1)
        slow, usual = _counts(times), _median(times.nanmean(0))
        for rank in {rank for rank, count in enumerate(slow) if count >= _MOST} - self._slow:
            own = float(times[:, rank].nanmean())
            if own > _SLOW * usual and own > usual + _LEAST_MS:
                self._slow.add(rank)
                logger.warning(self._text(rank, slow[rank], own, usual))
        for rank in [rank for rank in self._slow if slow[rank] <= _FEW]:
            self._slow.remove(rank)
            logger.warning("rank %d is no longer slower than the others", rank)

    def _times(self) -> torch.Tensor:
        """Milliseconds, by step, rank and kind; NaN where unknown."""
        codes = torch.frombuffer(bytearray(b"".join(self._rows)), dtype=torch.uint8).long()
        return _MILLIS[codes].view(-1, self._world_size, NBYTES)

    def _text(self, rank: int, count: int, own: float, usual: float) -> str:
        compute, other = self._times()[:, rank].nanmean(0).tolist()
        return (
            f"rank {rank} is slow, and the others wait for it: in {count} of the last {WINDOW} steps it took over "
            f"{_SLOW - 1:.0%} longer than the median rank, on average {own:.1f} ms instead of {usual:.1f} "
            f"({compute:.1f} in forward and backward, {other:.1f} in data loader, optimizer and the rest)"
        )

    def table(self) -> list[RankTime]:
        """The averages of each rank over the last steps; empty before the second step."""
        if not self._rows:
            return []
        times = self._times()
        totals = times.sum(-1)
        means, slow = times.nanmean(0).tolist(), _counts(totals)
        usual = _median(totals.nanmean(0))
        found = []
        for rank, (compute, other) in enumerate(means):
            is_slow = slow[rank] >= _MOST and compute + other > max(_SLOW * usual, usual + _LEAST_MS)
            found.append(RankTime(rank, compute, other, is_slow))
        return found


def _code(nanoseconds: int) -> int:
    return min(255, max(1, 1 + round(_PER_DOUBLING * math.log2(max(nanoseconds, 1) / 1e3))))


def _has_slow(field: bytes) -> bool:
    """Whether any rank was slow in this step."""
    pairs = zip(field[::NBYTES], field[1::NBYTES], strict=True)
    totals = sorted(_DECODED[compute] + _DECODED[other] for compute, other in pairs if compute and other)
    return bool(totals) and totals[-1] > _SLOW * totals[(len(totals) - 1) // 2]


def _counts(times: torch.Tensor) -> list[int]:
    """In how many steps each rank was slow."""
    counts: list[int] = (times > _SLOW * times.nanmedian(1, keepdim=True).values).sum(0).tolist()
    return counts


def _median(times: torch.Tensor) -> float:
    return float(times.nanmedian())
