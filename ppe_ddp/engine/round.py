"""One pass over the buckets of a plan: launched in order as their gradients land, landed in order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from time import perf_counter_ns
from typing import TYPE_CHECKING

import torch

from ppe_ddp.engine.flight import Flight, SparseFlight
from ppe_ddp.engine.trace import RoundRecord, span

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor, nn

    from ppe_ddp.engine.bucket_buffers import BucketBuffers
    from ppe_ddp.engine.bucket_plan import ParameterSpec, Plan
    from ppe_ddp.engine.completion import Steps
    from ppe_ddp.engine.groups import Groups
    from ppe_ddp.engine.reduction import Reduction

    Take = Callable[[Sequence[int]], list[Tensor | None]]
    HandOver = Callable[[Sequence[int], list[Tensor]], None]
    MakeFlight = Callable[..., Flight]


class Departures(ABC):
    """The order of departure: each bucket of a plan leaves when it is complete here and the one before it has gone.

    Args:
        plan: What to send.
        waiting: One byte a parameter: whether its gradient is expected here and has not landed.
        repair: Whether this is a second round.
    """

    def __init__(self, plan: Plan, waiting: bytes | bytearray, *, repair: bool = False) -> None:
        self.plan = plan
        self.record = RoundRecord(plan, repair=repair)
        self._gone = 0
        self._missing = [sum(waiting[i] for i in bucket.members) for bucket in plan.buckets]

    def landed(self, index: int) -> None:
        """Count the gradient of parameter ``index`` as there."""
        k = self.plan.bucket_of[index]
        self._missing[k] -= 1
        if self._missing[k] == 0:
            self.record.ready[k] = perf_counter_ns()

    def launch_ready(self) -> None:
        """Launch buckets in order, up to the first that still misses a gradient of this rank."""
        while self._gone < len(self.plan.buckets) and self._missing[self._gone] <= 0:
            if self._must_wait():
                break
            with torch.no_grad():
                self._depart()

    def launch_all(self) -> Steps:
        """Launch what is left, step by step: no gradient will land any more."""
        while self._gone < len(self.plan.buckets):
            yield from self._settle()
            self._depart()

    def _depart(self) -> None:
        k = self._gone
        self._gone += 1
        self.record.launch[k] = perf_counter_ns()
        self._launch(k)
        self.record.launched[k] = perf_counter_ns()

    @abstractmethod
    def _launch(self, k: int) -> None:
        """Launch bucket ``k`` of the plan."""

    @abstractmethod
    def _must_wait(self) -> bool:
        """Whether the next bucket must not leave, because one before it has not come back."""

    @abstractmethod
    def _settle(self) -> Steps:
        """Wait until the next bucket may leave."""


class Round(Departures):
    """The buckets of one plan on their way.

    Args:
        plan: What to send.
        buffers: Memory for it.
        waiting: One byte a parameter: whether its gradient is expected here and has not landed.
        take: Takes the gradients of parameters out of ``.grad``; None for one that is not there.
        reduction: Reduces a bucket.
        flight: Makes the flight of a bucket of dense gradients, with the arguments of :class:`Flight`.
        views: Whether the results may be views of the buffers.
        repair: Whether this is a second round.
        ranges: Whether to mark launches for torch's profiler.
    """

    def __init__(
        self,
        plan: Plan,
        buffers: BucketBuffers,
        *,
        waiting: bytes | bytearray,
        take: Take,
        reduction: Reduction,
        specs: Sequence[ParameterSpec],
        parameters: Sequence[nn.Parameter],
        flight: MakeFlight = Flight,
        views: bool = False,
        repair: bool = False,
        ranges: bool = False,
    ) -> None:
        super().__init__(plan, waiting, repair=repair)
        self.flights: list[Flight | SparseFlight] = []
        self._buffers = buffers
        self._take = take
        self._reduction = reduction
        self._make_flight = flight
        self._specs = specs
        self._parameters = parameters
        self._views = views
        self._ranges = ranges
        # only in a plan of fixed buckets are there members that no rank has
        self._is_exact = sum(len(bucket.members) for bucket in plan.buckets) == sum(plan.present)

    def is_back(self) -> bool:
        """Whether nothing of the dense ones is on its way."""
        return all(flight.is_back() for flight in self._dense())

    def _must_wait(self) -> bool:
        return self._reduction.one_at_a_time and not self.is_back()

    def _settle(self) -> Steps:
        if self._reduction.one_at_a_time:
            for flight in self._dense():
                if flight.is_under_way:
                    yield flight.probe()
                flight.settle(self._reduction)

    def _dense(self) -> list[Flight]:
        return [flight for flight in self.flights if isinstance(flight, Flight)]

    def _launch(self, k: int) -> None:
        bucket = self.plan.buckets[k]
        for flight in self._dense()[-1:]:
            flight.check(self._reduction)  # the other ranks would take this bucket for one that was never sent
        gradients = self._taken(bucket.members)
        if bucket.sparse:
            self.flights.append(SparseFlight(bucket, gradients[0], self._specs[bucket.members[0]]))
            return
        flight = self._make_flight(bucket, gradients, self._buffers, self._specs, views=self._views)
        self.flights.append(flight)
        with span(f"launch[{k}]", enabled=self._ranges):
            flight.launch(self._reduction, self._parameters, is_last=k == self.plan.last)

    def _taken(self, members: Sequence[int]) -> list[Tensor | None]:
        if self._is_exact:
            return self._take(members)
        # One that landed here though no rank expected it waits for the second round.
        present = self.plan.present
        taken = iter(self._take([i for i in members if present[i]]))
        return [next(taken) if present[i] else None for i in members]

    def land(self, groups: Groups, hand_over: HandOver) -> Steps:
        """Wait for the buckets in order, step by step; hand over the parameters of each and their averaged gradients.

        Sparse ones come last: they communicate only now, and by then no function of the user's is at work.
        """
        for k, flight in enumerate(self.flights):
            if isinstance(flight, Flight):
                if flight.is_under_way:
                    yield flight.probe()
                results = flight.land(self._reduction)
                self.record.done[k] = perf_counter_ns()
                members = flight.plan.members
                if self._is_exact:
                    hand_over(members, results)
                else:
                    chosen = [k for k, i in enumerate(members) if self.plan.present[i]]
                    hand_over([members[k] for k in chosen], [results[k] for k in chosen])
        for k, flight in enumerate(self.flights):
            if isinstance(flight, SparseFlight):
                self._reduction.pass_over(self._specs[flight.plan.members[0]].name)
                result = yield from flight.land(groups)
                self.record.nbytes[k] = flight.nbytes
                self.record.done[k] = perf_counter_ns()
                hand_over(flight.plan.members, [result])

    def abandon(self) -> Iterator[tuple[int, Tensor]]:
        """Leave what is in flight; yields the gradients that this rank had put in."""
        for flight in self.flights:
            if isinstance(flight, Flight):
                flight.abandon()
            for i, gradient in zip(flight.plan.members, flight.gradients, strict=True):
                if gradient is not None:
                    yield i, gradient
