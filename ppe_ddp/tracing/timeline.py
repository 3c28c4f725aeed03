"""``timeline()``: records what happens on this rank; the last rank makes files and pictures of all records."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, ClassVar

from torch import distributed as dist
from torch.optim import optimizer as torch_optimizer

from ppe_ddp.backends.group_internals import default_group
from ppe_ddp.backends.shared_memory.step_queue import StepParts
from ppe_ddp.engine.event_log import EventLog
from ppe_ddp.tracing.clock_offset import ClockOffset, alone, measure_offset
from ppe_ddp.tracing.rank_record import RankRecord
from ppe_ddp.tracing.timeline_folder import check_pictures, publish, record_file

if TYPE_CHECKING:
    import os
    from collections.abc import Generator

    from ppe_ddp.engine.groups import Groups


@contextmanager
def timeline(folder: str | os.PathLike[str], *, pictures: bool = True) -> Generator[None, None, None]:
    """Record what this rank does inside, on all ranks together, and draw it.

    What is recorded: forward, backward and optimizer; of each synchronized backward the mask, the vote and each bucket
    (packed, encoded, under way, decoded); the all-gathers of a ``DistributedOptimizer``; and when a rank did nothing
    but wait. The ranks compare their clocks as they enter, or where the first wrapper is made if no process group is
    there yet. Every rank leaves a ``rank-N.json``; the last to leave makes of them

    - ``timeline.json`` for https://ui.perfetto.dev,
    - ``timeline.png``, one step of all ranks,
    - ``gradients.png``, which parameters had a gradient on which rank in which step,
    - ``summary.txt``, with the part of the communication that is hidden and the error of the clocks.

    Where the ranks do not share a file system, bring their files into one folder, and call
    ``python -m ppe_ddp timeline FOLDER``. Nothing is sent at the end, so that a rank may leave by an exception.

    It costs a few microseconds a bucket, and no rank waits for another. Times are the host's: what a GPU does at which
    time is for ``torch.profiler``. The newest 10,000 backwards are kept.

    Args:
        folder: Made if there is none. Files of an earlier recording are replaced.
        pictures: Whether to draw pictures, which needs matplotlib.

    Raises:
        ImportError: At entry, where pictures are wanted and matplotlib is not installed.
        RuntimeError: There is a timeline already in this process.
    """
    if pictures:
        check_pictures()
    path = Path(folder).absolute()
    path.mkdir(parents=True, exist_ok=True)
    recording: Recording | None = None
    try:
        with record() as recording:
            yield
    finally:
        if recording is not None:
            one = recording.result()
            one.write(record_file(path, one.clock.rank))
            publish(path, one.clock, pictures=pictures)


@dataclass(frozen=True)
class Recording:
    """What is being recorded.

    Attributes:
        log: What the engine writes into.
        clock: The clock of this rank.
    """

    log: EventLog
    clock: _Clock

    def result(self) -> RankRecord:
        """What was recorded until now."""
        return RankRecord.of(self.log, self.clock.offset)


@contextmanager
def record() -> Generator[Recording, None, None]:
    """Record what this rank does inside, on all ranks together, as :func:`timeline` does.

    Raises:
        RuntimeError: Something is being recorded already in this process.
    """
    if EventLog.current is not None:
        raise RuntimeError("a timeline is being recorded in this process already; end that one before")
    clock = _Clock()
    if dist.is_initialized():
        clock.compare(default_group())
    log = EventLog(clock.on_groups)
    hooks = [
        torch_optimizer.register_optimizer_step_pre_hook(_OptimizerHook(log, begins=True)),
        torch_optimizer.register_optimizer_step_post_hook(_OptimizerHook(log, begins=False)),
    ]
    EventLog.current = log
    StepParts.listener = log.add
    try:
        yield Recording(log, clock)
    finally:
        EventLog.current = StepParts.listener = None
        for hook in hooks:
            hook.remove()


class _Clock:
    """This rank's clock beside that of rank 0, found out once.

    Attributes:
        offset: The result; before that, the process counts as alone.
    """

    def __init__(self) -> None:
        self.offset: ClockOffset = alone()
        self._is_compared = False

    def compare(self, group: Any) -> None:
        """Compare with all ranks of ``group``, which come here together."""
        if not self._is_compared:
            self.offset = measure_offset(group)
            self._is_compared = True

    def on_groups(self, groups: Groups) -> None:
        """A wrapper has made its groups, on all of their ranks together."""
        if groups.world_size == dist.get_world_size():  # only what all ranks do can be compared with rank 0
            self.compare(groups.control)


class _OptimizerHook:
    """Tells the log of steps of any optimizer; those inside of another's step are part of that.

    Args:
        log: Where to write.
        begins: Whether a step begins where this is called, or ends.
    """

    _depth: ClassVar[int] = 0
    _begin: ClassVar[int] = 0

    def __init__(self, log: EventLog, *, begins: bool) -> None:
        self._log = log
        self._begins = begins

    def __call__(self, optimizer: object, _args: object, _kwargs: object) -> None:
        kind = type(self)
        if self._begins:
            if kind._depth == 0:
                kind._begin = perf_counter_ns()
            kind._depth += 1
            return
        kind._depth = max(0, kind._depth - 1)
        if kind._depth == 0:
            self._log.add("optimizer", type(optimizer).__name__, kind._begin)
