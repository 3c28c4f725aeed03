"""The log of what happens on this rank while a timeline is made.

Apart from ``trace.py``, which is always on and tells of one backward: a log is there only while somebody has asked for
a timeline, keeps all backwards, and has what lies outside of them. Everything that could write into it looks first
whether there is one, which costs some 30 ns.
"""

from __future__ import annotations

from collections import deque
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ppe_ddp.backends.work import Work
from ppe_ddp.torch_internals import is_future

if TYPE_CHECKING:
    from collections.abc import Callable

    from ppe_ddp.engine.groups import Groups
    from ppe_ddp.engine.trace import Recorder

_MOST_SPANS = 400_000
_MOST_BACKWARDS = 10_000


class Span(NamedTuple):
    """Something that took a while.

    Attributes:
        kind: What it was; :data:`ppe_ddp.tracing.spans.KINDS` lists them.
        name: Which one.
        begin: By ``perf_counter_ns()``.
        end: The same.
        nbytes: What this rank has sent; 0 where it is no message.
    """

    kind: str
    name: str
    begin: int
    end: int
    nbytes: int = 0


class EventLog:
    """Collects spans, and the recorders of backwards. The newest are kept, where it gets too long.

    Args:
        on_groups: Called when a wrapper has made its groups, on all of their ranks together.

    Attributes:
        spans: All spans that have ended.
        backwards: The recorders of all backwards that have succeeded.
        on_groups: The same.
    """

    current: ClassVar[EventLog | None] = None
    """The one to write into; None while no timeline is made."""

    def __init__(self, on_groups: Callable[[Groups], None]) -> None:
        self.spans: deque[Span] = deque(maxlen=_MOST_SPANS)
        self.backwards: deque[Recorder] = deque(maxlen=_MOST_BACKWARDS)
        self.on_groups = on_groups
        self._begun: dict[tuple[str, int], int] = {}

    def begin(self, kind: str, owner: object) -> None:
        """Something of this kind begins, of which each ``owner`` has one at a time."""
        self._begun[kind, id(owner)] = perf_counter_ns()

    def end(self, kind: str, owner: object, name: str) -> None:
        """What ``owner`` has begun has ended."""
        begin = self._begun.pop((kind, id(owner)), None)
        if begin is not None:
            self.add(kind, name, begin)

    def add(self, kind: str, name: str, begin: int, nbytes: int = 0) -> None:
        """Something has taken from ``begin`` until now."""
        self.spans.append(Span(kind, name, begin, perf_counter_ns(), nbytes))

    def add_message(self, kind: str, name: str, begin: int, pending: Any, nbytes: int = 0) -> None:
        """A message is under way since ``begin``; it is added when it has arrived."""
        watch(pending, lambda: self.add(kind, name, begin, nbytes))


def watch(pending: Any, arrived: Callable[[], None]) -> bool:
    """Have ``arrived`` called when ``pending`` has, in whatever thread that is noticed; False if nobody can tell."""
    pending = getattr(pending, "work", pending)
    if isinstance(pending, Work):  # its future would wait for it, and take the time that is to be measured
        pending.when_ended(arrived)
        return True
    try:
        future = pending if is_future(pending) else pending.get_future()
        future.add_done_callback(lambda _: arrived())
    except (AttributeError, NotImplementedError, RuntimeError):  # a Work need not have one
        return False
    return True
