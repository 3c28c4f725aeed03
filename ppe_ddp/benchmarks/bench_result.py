"""The results of ``bench step`` for one model, combined from the numbers of all ranks. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ppe_ddp.benchmarks.bench_contestants import (
    CONTESTANTS,
    Bare,
    Contestant,
    Ours,
    OursByGloo,
    OursOverMpi,
    OursOverMpiThread,
    Torch,
    Traffic,
)

if TYPE_CHECKING:
    from ppe_ddp.benchmarks.bench_measure import RankResult
    from ppe_ddp.benchmarks.bench_models import Workload

__all__ = ["ContestantResult", "ModelResult", "Spread", "combine"]


_KINDS: tuple[type[Contestant], ...] = (Ours, OursByGloo, OursOverMpi, OursOverMpiThread, *CONTESTANTS[1:])


@dataclass(frozen=True)
class Spread:
    """A median and the quartiles around it.

    Attributes:
        median: Half of the values are below.
        lower: A quarter of the values are below.
        upper: A quarter of the values are above.
    """

    median: float
    lower: float
    upper: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """That of ``values``, of which there is at least one."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, lower, upper)


@dataclass(frozen=True)
class ContestantResult:
    """One contestant on one model.

    Attributes:
        name: The contestant.
        skipped: Why it did not take part; None if it did, and all else is None if it did not.
        milliseconds: Of one step.
        ratio: Of its step time and the reference's, each time within one repetition.
        exposed: How much longer than the bare model's its step takes, by medians, where torch DDP's is 1; None where
            one of them was not measured, or torch's takes no longer.
        traffic: What one rank sent in one step.
        steps_ms: Of one step, a number for each repetition.
        launch_us: The host's microseconds for packing and launching a bucket; None where it is not known.
        launches: How many buckets that is of, on all ranks.
    """

    name: str
    skipped: str | None = None
    milliseconds: Spread | None = None
    ratio: Spread | None = None
    exposed: float | None = None
    traffic: Traffic | None = None
    steps_ms: tuple[float, ...] | None = None
    launch_us: Spread | None = None
    launches: int = 0


@dataclass(frozen=True)
class ModelResult:
    """All contestants on one model.

    Attributes:
        name: The model.
        title: What it is.
        world_size: On how many ranks.
        block_steps: How many steps were timed at a time.
        parameters: How many parameters it has.
        parameter_nbytes: Their bytes.
        existing_nbytes: Bytes of the gradients that some rank's own backward made in one step.
        reference: Whom ratios compare with.
        contestants: Their results.
    """

    name: str
    title: str
    world_size: int
    block_steps: int
    parameters: int
    parameter_nbytes: int
    existing_nbytes: int
    reference: str
    contestants: tuple[ContestantResult, ...]

    @property
    def ours(self) -> ContestantResult:
        """That of ppe_ddp."""
        return next(result for result in self.contestants if result.name == Ours.name)


def combine(workload: Workload, block_steps: int, ranks: Sequence[RankResult]) -> ModelResult:
    """Brings together what the ranks measured.

    A block took as long as it took the slowest rank. What was sent is rank 0's, and nothing where there is
    no other rank.

    Args:
        workload: What was measured.
        block_steps: How many steps a block had.
        ranks: What each rank measured.
    """
    first = ranks[0]
    seconds = _of_slowest(ranks)
    base = seconds[workload.reference]
    order = [kind.name for kind in _KINDS]
    contestants = tuple(
        ContestantResult(name, first.skipped[name]) if name in first.skipped else _result(name, seconds, base, ranks)
        for name in sorted([*seconds, *first.skipped], key=lambda name: order.index(name) if name in order else 0)
    )
    present = [any(here) for here in zip(*(rank.present for rank in ranks), strict=True)]
    return ModelResult(
        name=workload.name,
        title=workload.title,
        world_size=len(ranks),
        block_steps=block_steps,
        parameters=len(first.nbytes),
        parameter_nbytes=sum(first.nbytes),
        existing_nbytes=sum(n for n, here in zip(first.nbytes, present, strict=True) if here),
        reference=workload.reference,
        contestants=contestants,
    )


def _of_slowest(ranks: Sequence[RankResult]) -> dict[str, list[float]]:
    return {
        name: [max(blocks) for blocks in zip(*(rank.seconds[name] for rank in ranks), strict=True)]
        for name in ranks[0].seconds
    }


def _result(
    name: str, seconds: Mapping[str, Sequence[float]], base: Sequence[float], ranks: Sequence[RankResult]
) -> ContestantResult:
    own = seconds[name]
    steps_ms = tuple(1e3 * value for value in own)
    launch_us = [1e6 * value for rank in ranks for value in rank.launches.get(name, ())]
    return ContestantResult(
        name,
        milliseconds=Spread.of(steps_ms),
        ratio=Spread.of([value / other for value, other in zip(own, base, strict=True)]),
        exposed=_exposed(name, seconds) if len(ranks) > 1 else None,
        traffic=ranks[0].traffic[name] if len(ranks) > 1 else Traffic(),
        steps_ms=steps_ms,
        launch_us=Spread.of(launch_us) if launch_us else None,
        launches=len(launch_us),
    )


def _exposed(name: str, seconds: Mapping[str, Sequence[float]]) -> float | None:
    if Bare.name not in seconds or Torch.name not in seconds:
        return None
    bare, torchs, own = (statistics.median(seconds[one]) for one in (Bare.name, Torch.name, name))
    return (own - bare) / (torchs - bare) if torchs > bare else None
