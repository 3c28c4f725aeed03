"""Finds slow ranks: each vote carries the rank's own time in the step, without waiting for other ranks.

    end of a synchronization to the next forward    data, optimizer and the rest: one byte, on a logarithmic scale
    that forward to the end of backward             computation: another byte

Every rank gets the times of all ranks. Times are those of the host; on GPUs they measure launching the work.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect
from collections import deque
from dataclasses import dataclass
from time import perf_counter_ns

import torch

logger = logging.getLogger("ppe_ddp")

NBYTES = 2
"""The size of a rank's field."""
WINDOW = 20
"""The number of last steps that count."""
SLOW = 1.2
"""A slow rank takes at least this many times the median rank's time."""
_MOST, _FEW = 19, 10  # slow steps in a window: from which on a rank is slow, and up to which it is slow by chance
_LEAST_SECONDS = 2.0  # of slowness before a warning: on a shared core a rank may be slow for a second
LEAST_MS = 1.0
"""A slow rank takes at least this much longer; smaller differences are ignored."""
_JUDGED_EVERY = 4
_PER_DOUBLING = 8
_DECODED = [math.nan, *(2 ** (code / _PER_DOUBLING) / 1e3 for code in range(255))]  # milliseconds
_MILLIS = torch.tensor(_DECODED, dtype=torch.float32, device="cpu")
# The lower limit of each code from 1 to 255, in nanoseconds; a time gets the nearest code on the logarithmic scale.
_LIMITS = [-math.inf, *(1e3 * 2 ** ((code - 0.5) / _PER_DOUBLING) for code in range(1, 255))]


@dataclass(frozen=True)
class RankTime:
    """The duration of a step on one rank, without waiting for other ranks; the mean of the last 20 steps.

    Attributes:
        rank: The rank, in the wrapper's group.
        compute_ms: From its first forward to the end of its backward, in milliseconds; NaN if it had none.
        other_ms: From the end of the last synchronization to that forward: data loader, optimizer and the rest.
        is_slow: Whether it takes over 20 % longer than the median rank, by 1 ms or more, in nearly every step.
    """

    rank: int
    compute_ms: float
    other_ms: float
    is_slow: bool


class RankTimes:
    """The times of all ranks in the last steps; rank 0 logs slow ranks."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._rows: deque[bytes] = deque(maxlen=WINDOW)
        self._has_slow: deque[bool] = deque(maxlen=WINDOW)  # of each row
        self._count = 0
        self._ended_at = self._forward_at = 0
        self._slow: set[int] = set()
        self._slow_ms: dict[int, float] = {}  # by rank that may be named: its own time since it became slow

    def begin_forward(self) -> None:
        if not self._forward_at:
            self._forward_at = perf_counter_ns()

    def end_step(self) -> None:
        """Note the end of the synchronization, also if it was given up."""
        self._ended_at, self._forward_at = perf_counter_ns(), 0

    def field(self, backward_at: int) -> bytes:
        """This rank's field in a vote; its backward was over at ``backward_at`` (``perf_counter_ns()``)."""
        if not (self._forward_at and self._ended_at):
            return bytes(NBYTES)
        compute, other = backward_at - self._forward_at, self._forward_at - self._ended_at
        return bytes([bisect(_LIMITS, compute), bisect(_LIMITS, other)])

    def note(self, field: bytes) -> None:
        """Take the fields of all ranks, in rank order; rank 0 logs which ranks have become slow, or normal again."""
        self._rows.append(field)
        self._count += 1
        if self._rank or self._count % _JUDGED_EVERY:
            return
        self._has_slow.extend(map(_has_slow, list(self._rows)[-_JUDGED_EVERY:]))
        if self._slow or sum(self._has_slow) >= _MOST:
            self._judge()
        else:
            self._slow_ms.clear()

    def _judge(self) -> None:
        rows, counts, usual = self._summary()
        before, self._slow_ms = self._slow_ms, {}
        for row in rows:
            if row.is_slow and row.rank not in self._slow:
                step_ms, known = row.compute_ms + row.other_ms, before.get(row.rank)
                slow_ms = WINDOW * step_ms if known is None else known + _JUDGED_EVERY * step_ms
                if slow_ms < 1e3 * _LEAST_SECONDS:
                    self._slow_ms[row.rank] = slow_ms
                    continue
                self._slow.add(row.rank)
                logger.warning(
                    f"rank {row.rank} is slow, and the others wait for it: in {counts[row.rank]} of the last {WINDOW} "
                    f"steps it took over {SLOW - 1:.0%} longer than the median rank, on average "
                    f"{row.compute_ms + row.other_ms:.1f} ms instead of {usual:.1f} ({row.compute_ms:.1f} in forward "
                    f"and backward, {row.other_ms:.1f} in data loader, optimizer and the rest)"
                )
            elif row.rank in self._slow and counts[row.rank] <= _FEW:
                self._slow.remove(row.rank)
                logger.warning("rank %d is no longer slower than the others", row.rank)

    def table(self) -> list[RankTime]:
        """The averages of each rank over the last steps; empty before the first."""
        return self._summary()[0] if self._rows else []

    def _summary(self) -> tuple[list[RankTime], list[int], float]:
        """The averages of each rank, the number of slow steps of each, and the median rank's milliseconds a step."""
        codes = torch.frombuffer(bytearray(b"".join(self._rows)), dtype=torch.uint8).long()
        times = _MILLIS[codes].view(len(self._rows), -1, NBYTES)  # by step, rank and kind; NaN where unknown
        totals = times.sum(-1)
        counts = (totals > SLOW * totals.nanmedian(1, keepdim=True).values).sum(0).tolist()
        usual = float(totals.nanmean(0).nanmedian())
        rows = []
        for rank, (compute, other) in enumerate(times.nanmean(0).tolist()):
            is_slow = counts[rank] >= _MOST and compute + other > max(SLOW * usual, usual + LEAST_MS)
            rows.append(RankTime(rank, compute, other, is_slow))
        return rows, counts, usual


def _has_slow(field: bytes) -> bool:
    pairs = zip(field[::NBYTES], field[1::NBYTES], strict=True)
    totals = sorted(_DECODED[compute] + _DECODED[other] for compute, other in pairs if compute and other)
    return bool(totals) and totals[-1] > SLOW * totals[(len(totals) - 1) // 2]
