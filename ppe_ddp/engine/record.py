"""Records clock readings of this rank's events, for tests, benchmarks and timelines.

Each backward has a :class:`Recorder`: a few clock readings a bucket, from which a readable :class:`Trace` is made on
demand. An :class:`EventLog` exists only while a timeline is made. It keeps the recorders of all backwards, and the
events outside of them. Code that could write to it first checks whether it exists, which costs 30 ns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

from torch.profiler import record_function

from ppe_ddp.backends.work import Work
from ppe_ddp.engine.groups import Groups
from ppe_ddp.engine.plan import Plan
from ppe_ddp.torch_internals import is_future

T = TypeVar("T")
R = TypeVar("R")

_MOST_SPANS = 400_000
_MOST_BACKWARDS = 10_000


def span(name: str) -> AbstractContextManager[object]:
    """A range ``ppe_ddp.<name>`` in torch's profiler."""
    return record_function(f"ppe_ddp.{name}")


def in_ranges(name: str, steps: Generator[T, None, R]) -> Generator[T, None, R]:
    """Run ``steps``, each as a range ``ppe_ddp.<name>`` in torch's profiler."""
    while True:
        with span(name):
            try:
                pending = next(steps)
            except StopIteration as end:
                return cast("R", end.value)
        yield pending


@dataclass(frozen=True)
class BucketTrace:
    """One bucket of one backward. Times are nanoseconds since the backward reached the module.

    Attributes:
        parameters: The names of the parameters in it.
        nbytes: Bytes of its gradients, as sent by this rank (for a sparse one: indices and values).
        ready_ns: When the last of its gradients that exist here had arrived.
        launch_ns: When its launch began: packing its gradients, and handing them to the transport.
        packed_ns: When its gradients had been packed, and the function or hook was called.
        launched_ns: When its launch was over and this thread went on. The time since ``launch_ns`` is the host's own
            time for the bucket. If the function or the transport blocks, it includes all of its communication.
        done_ns: When its result was in place.
        repair: Whether it belongs to the second round.
    """

    parameters: tuple[str, ...]
    nbytes: int
    ready_ns: int
    launch_ns: int
    packed_ns: int
    launched_ns: int
    done_ns: int
    repair: bool


@dataclass(frozen=True)
class Trace:
    """One synchronized backward, as this rank saw it.

    Attributes:
        local: Names of the parameters that were expected to have a gradient here.
        agreed: Names of the parameters that have a gradient on some rank.
        buckets: In launch order, the second round after the first.
        control_nbytes: Bytes of masks that this rank sent.
        agreed_ns: When the agreed mask was known.
        backward_ns: When autograd had finished and only communication was left.
        total_ns: When the gradients were handed over.
        repaired: Names of the parameters that needed the second round.
    """

    local: tuple[str, ...]
    agreed: tuple[str, ...]
    buckets: tuple[BucketTrace, ...]
    control_nbytes: int
    agreed_ns: int
    backward_ns: int
    total_ns: int
    repaired: tuple[str, ...]

    @property
    def gradient_nbytes(self) -> int:
        """Bytes of gradients that this rank sent."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def after_backward_ns(self) -> int:
        """The time that communication took after backward was over."""
        return self.total_ns - self.backward_ns

    def __str__(self) -> str:
        """A summary of a few lines."""
        lines = [
            f"{len(self.agreed)} gradients on some rank, {len(self.local)} here; "
            f"{self.gradient_nbytes} bytes in {len(self.buckets)} buckets, {self.control_nbytes} bytes of masks",
            f"mask agreed at {self.agreed_ns / 1e6:.3f} ms, backward over at {self.backward_ns / 1e6:.3f} ms, "
            f"done at {self.total_ns / 1e6:.3f} ms",
        ]
        for k, bucket in enumerate(self.buckets):
            lines.append(
                f"  bucket {k}{' (repair)' if bucket.repair else ''}: {len(bucket.parameters)} gradients, "
                f"{bucket.nbytes} bytes, ready {bucket.ready_ns / 1e6:.3f}, launched {bucket.launch_ns / 1e6:.3f}, "
                f"done {bucket.done_ns / 1e6:.3f} ms"
            )
        return "\n".join(lines)


@dataclass
class Recorder:
    """The clock readings of one backward, by ``perf_counter_ns()``. 0 stands for never."""

    names: tuple[str, ...]  # of all parameters
    begin: int = field(default_factory=perf_counter_ns)  # when the backward reached the module
    local: bytes = b""  # one byte a parameter: whether it was expected to have a gradient here
    agreed: bytes = b""  # one byte a parameter: whether some rank has its gradient
    asked_at: int = 0  # when the mask was sent
    agreed_at: int = 0  # when this rank had noticed the agreed mask
    backward_at: int = 0  # when autograd had finished
    vote_at: int = 0  # when the vote was sent
    voted_at: int = 0  # when its result had arrived; recorded while a timeline is made
    averaged_at: int = 0  # when all averages had arrived, before they were written to ``.grad``
    returned_at: int = 0  # when the end of the backward was over
    done_at: int = 0  # when the gradients were handed over: later, where results are waited for later (Megatron)
    control_nbytes: int = 0  # bytes of masks
    rounds: list[RoundRecord] = field(default_factory=list)  # of buckets
    wrapper: int = 0  # tells those of one wrapper, whose names may change, from those of others

    def note_vote(self) -> None:
        """Note that the result of the vote has arrived."""
        self.voted_at = perf_counter_ns()

    def trace(self) -> Trace:
        """Convert to the readable form."""
        buckets = [bucket for record in self.rounds for bucket in record.traces(self.names, self.begin)]
        repaired = {name for bucket in buckets if bucket.repair for name in bucket.parameters}
        return Trace(
            local=self._named(self.local),
            agreed=self._named(self.agreed),
            buckets=tuple(buckets),
            control_nbytes=self.control_nbytes,
            agreed_ns=self.agreed_at - self.begin,
            backward_ns=self.backward_at - self.begin,
            total_ns=self.done_at - self.begin,
            repaired=tuple(name for name in self.names if name in repaired),
        )

    def _named(self, mask: bytes) -> tuple[str, ...]:
        return tuple(name for name, present in zip(self.names, mask, strict=False) if present)


@dataclass
class BucketRecord:
    """The clock readings of one bucket of one backward. 0 stands for never."""

    ready: int = 0  # when the last of its gradients had arrived
    launch: int = 0  # when its launch began
    packed: int = 0  # when its gradients had been packed
    launched: int = 0  # when the launch was over
    arrived: int = 0  # when the messages of all ranks had arrived; recorded while a timeline is made
    done: int = 0  # when the end of the backward had waited for it
    nbytes: int = 0  # bytes that this rank has sent
    goes_in_turns: bool = False  # whether its messages are logged one by one, as for a compressor

    def note_arrival(self) -> None:
        """Note that the messages of all ranks have arrived."""
        self.arrived = perf_counter_ns()


@dataclass
class RoundRecord:
    """The records of one plan's buckets."""

    plan: Plan
    repair: bool  # whether it is of a second round
    buckets: list[BucketRecord] = field(default_factory=list)

    def traces(self, names: tuple[str, ...], begin: int) -> list[BucketTrace]:
        """The launched buckets, in readable form."""
        return [
            BucketTrace(
                parameters=tuple(names[i] for i in bucket.members),
                nbytes=one.nbytes,
                # a bucket without gradients of this rank waits for none
                ready_ns=(one.ready or one.launch) - begin,
                launch_ns=one.launch - begin,
                packed_ns=(one.packed or one.launch) - begin,
                # a launch that raised has no end
                launched_ns=max(one.launch, one.launched) - begin,
                done_ns=one.done - begin,
                repair=self.repair,
            )
            for bucket, one in zip(self.plan.buckets, self.buckets, strict=True)
            if one.launch
        ]


class Span(NamedTuple):
    """An event with a duration."""

    kind: str  # one of :data:`ppe_ddp.tracing.rank_record.KINDS`
    name: str  # tells it from others of its kind
    begin: int  # by ``perf_counter_ns()``
    end: int  # by the same clock
    nbytes: int = 0  # bytes that this rank has sent; 0 if it is no message


class EventLog:
    """Collects spans and the recorders of backwards; beyond a maximum it drops the oldest.

    ``on_groups`` is called when a wrapper has made its groups, on all of their ranks together.
    """

    current: ClassVar[EventLog | None] = None
    """The log to write to; None while no timeline is made."""
    step_hooks: ClassVar[int] = 2
    """The number of hooks for the steps of all optimizers that a timeline registers."""

    def __init__(self, on_groups: Callable[[Groups], None]) -> None:
        self.spans: deque[Span] = deque(maxlen=_MOST_SPANS)  # all spans that have ended
        # The recorders of all backwards that have succeeded.
        self.backwards: deque[Recorder] = deque(maxlen=_MOST_BACKWARDS)
        self.on_groups = on_groups
        self._begun: dict[tuple[str, int], int] = {}

    def begin(self, kind: str, owner: object) -> None:
        """Begin a span of this kind; each ``owner`` has one at a time."""
        self._begun[kind, id(owner)] = perf_counter_ns()

    def end(self, kind: str, owner: object, name: str) -> None:
        """End the span that ``owner`` has begun; does nothing if there is none."""
        begin = self._begun.pop((kind, id(owner)), None)
        if begin is not None:
            self.add(kind, name, begin)

    def add(self, kind: str, name: str, begin: int, nbytes: int = 0) -> None:
        """Add a span from ``begin`` until now."""
        self.spans.append(Span(kind, name, begin, perf_counter_ns(), nbytes))

    def add_message(self, kind: str, name: str, begin: int, pending: Any, nbytes: int = 0) -> None:
        """Add a span from ``begin`` when the message ``pending`` has arrived."""
        watch(pending, lambda: self.add(kind, name, begin, nbytes))


def watch(pending: Any, arrived: Callable[[], None]) -> bool:
    """Call ``arrived`` when ``pending`` has arrived, in the thread that notices it; False if it cannot be noticed."""
    pending = getattr(pending, "work", pending)
    if isinstance(pending, Work):  # its future would wait for it, and so change the measured time
        pending.when_done(arrived)
        return True
    try:
        future = pending if is_future(pending) else pending.get_future()
        future.add_done_callback(lambda _: arrived())
    except (AttributeError, NotImplementedError, RuntimeError):  # a Work need not have a future
        return False
    return True
