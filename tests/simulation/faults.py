"""What befalls the ranks of a history, drawn from its seed."""

import enum
from dataclasses import dataclass
from unittest import mock

from torch import distributed as dist

from ppe_ddp.engine.bucket import PackedBucket

from .scheduler import Scheduler


class Planned(Exception):
    """The error of a rank that fails by plan, with the place."""


class Where(enum.Enum):
    """What happens, and where."""

    LOSS = enum.auto()
    """The loss raises, so that there is no backward."""
    EARLY = enum.auto()
    """The backward raises before it reaches the wrapper."""
    BACKWARD = enum.auto()
    """The backward raises when it has gone through the module, if it does go through."""
    HOOK = enum.auto()
    """A hook on a gradient raises."""
    PACKING = enum.auto()
    """There is no memory to pack a bucket."""
    FUNCTION = enum.auto()
    """The reduce function raises before it has sent anything."""
    FUNCTION_LATE = enum.auto()
    """The reduce function raises after it has sent a bucket."""
    INTERRUPT = enum.auto()
    """The rank is interrupted in some wait in this step."""
    NAN = enum.auto()
    """The outputs are NaN."""
    NAN_GRADIENT = enum.auto()
    """One gradient is NaN."""
    SLOW = enum.auto()
    """The rank takes its time, less than the timeout."""
    DIES = enum.auto()
    """The rank is no more, from some wait in this step on."""
    FINALIZE = enum.auto()
    """Of a split model: finalize_model_grads() raises before the ranks agree on what is summed."""
    LATE = enum.auto()
    """... after the last sum."""
    CLIP = enum.auto()
    """... clip_grad_norm_() raises."""
    UPDATE = enum.auto()
    """... the step of a DistributedOptimizer raises."""
    BEGINNING = enum.auto()
    """Of ranks that train by themselves: an outer step raises before anything is sent."""
    TAKING = enum.auto()
    """... when its averages have arrived."""

    def __repr__(self):
        return self.name


BEHIND_BACKWARD = (Where.FINALIZE, Where.LATE, Where.CLIP, Where.UPDATE)
_NOT_RAISING = (Where.INTERRUPT, Where.NAN, Where.NAN_GRADIENT, Where.SLOW, Where.DIES)
_OF_OUTER_STEPS = (Where.BEGINNING, Where.TAKING)
RAISING = tuple(where for where in Where if where not in (*_NOT_RAISING, *BEHIND_BACKWARD, *_OF_OUTER_STEPS))


@dataclass(frozen=True)
class Fault:
    """What befalls one rank.

    Attributes:
        rank: The rank.
        step: The step.
        where: What happens.
        number: Which parameter, how many waits, or how many tenths of a second.
        passes: How often the rank comes to the place without harm.
    """

    rank: int
    step: int
    where: Where
    number: int
    passes: int = 0

    @classmethod
    def some(cls, draw, world_size, steps, *, with_nan):
        """At most one death, and then no rank that is slow: it would be taken for another one."""
        dies = draw.random() < 0.2
        kinds = RAISING
        if not dies:
            kinds = (*RAISING, Where.SLOW, Where.INTERRUPT, *[Where.NAN, *[Where.NAN_GRADIENT] * 2] * 3 * with_nan)
        faults = [
            cls(draw.randrange(world_size), draw.randrange(steps), draw.choice(kinds), draw.randrange(200))
            for _ in range(draw.choice([1, 1, 2, 3]) - dies)
        ]
        if dies:
            faults.append(cls(draw.randrange(world_size), draw.randrange(steps), Where.DIES, draw.randrange(40)))
        elif steps > 1 and draw.random() < 0.1:
            faults += cls.close(draw, world_size, steps)
        return tuple(faults)

    @classmethod
    def close(cls, draw, world_size, steps):
        """One rank is slow, and another one fails in the step after: others may still wait for what the first sends."""
        step, (slow, failing) = draw.randrange(steps - 1), draw.sample(range(world_size), 2)
        where = draw.choice((Where.LOSS, Where.EARLY))
        return [cls(slow, step, Where.SLOW, draw.randrange(5, 100)), cls(failing, step + 1, where, 0)]


@dataclass(frozen=True)
class Change:
    """What one rank alone does to a parameter before a step: it freezes it, or thaws it.

    Attributes:
        rank: The rank.
        step: The step.
        number: Which parameter, of those that were trained.
        trains: Whether it is trained from then on.
    """

    rank: int
    step: int
    number: int
    trains: bool

    def apply(self, rank, step, models):
        """Do it, where it is due."""
        if (rank, step) == (self.rank, self.step):
            models.trained[self.number % len(models.trained)].requires_grad_(self.trains)


class Faults:
    """Those of one run.

    Attributes:
        fired: When each has happened; those of which the place was never reached have not.
    """

    current = None

    def __init__(self, planned, changes, world_size):
        self._planned, self._changes = planned, changes
        self.fired = {}
        self.steps = [-1] * world_size
        self._passed = dict.fromkeys(planned, 0)

    def due(self, where, is_meant=bool):
        """The fault that this rank has now, here; None if there is none, or ``is_meant`` is not true of it."""
        scheduler = Scheduler.current
        rank = scheduler.task.rank
        for fault in self._planned:
            if (fault.rank, fault.step, fault.where) == (rank, self.steps[rank], where) and fault not in self.fired:
                if not is_meant(fault):
                    continue
                self._passed[fault] += 1
                if self._passed[fault] <= fault.passes:
                    continue
                self.fired[fault] = scheduler.now
                scheduler.note("fault", where.name)
                return fault
        return None

    def at(self, where, is_meant=bool):
        """Raise what this rank has to raise here."""
        if self.due(where, is_meant) is not None:
            self.end_step()  # who tells of one error is not interrupted as well
            raise MemoryError("planned") if where is Where.PACKING else Planned(where)

    def hook(self, where):
        """A hook on a gradient that raises where it has to."""

        def call(gradient):
            self.at(where)

        return call

    def poisons(self, rank, number):
        """Whether the outputs of ``rank`` are NaN in a step."""
        return bool(self._numbers(rank, number, Where.NAN))

    def poison(self, rank, number, models):
        """Let what ``models`` compute as ``rank`` in a step be NaN where that is planned; what to remove at its end."""
        models.is_poisoned = self.poisons(rank, number)
        numbers = self._numbers(rank, number, Where.NAN_GRADIENT)
        return _hooked(models, numbers, lambda gradient: None if gradient is None else gradient * float("nan"))

    def _numbers(self, rank, number, where):
        return [one.number for one in self._planned if (one.rank, one.step, one.where) == (rank, number, where)]

    def begin_step(self, number, models):
        """A step of this rank with ``models`` begins; what to remove at its end."""
        rank = Scheduler.current.task.rank
        self.steps[rank] = number
        slow = self.due(Where.SLOW)
        if slow is not None:
            Scheduler.current.sleep(slow.number / 10)
        for fault in self._planned:
            if (fault.rank, fault.step, fault.where) == (rank, number, Where.INTERRUPT):
                Scheduler.current.signals[rank] = 1 + fault.number // 4
        dies = self.due(Where.DIES)
        if dies is not None:
            Scheduler.current.doom[rank] = dies.number
        models.computed, models.held = set(), []
        for change in self._changes:
            change.apply(rank, number, models)
        numbers = self._numbers(rank, number, Where.HOOK)
        return self.poison(rank, number, models) + _hooked(models, numbers, self.hook(Where.HOOK))

    def end_step(self):
        """The step of this rank is over; an interrupt would come too late."""
        Scheduler.current.signals.pop(Scheduler.current.task.rank, None)

    def interrupted(self, number):
        """This rank was interrupted in a step."""
        rank = Scheduler.current.task.rank
        fault = next(f for f in self._planned if (f.rank, f.step, f.where) == (rank, number, Where.INTERRUPT))
        self.fired[fault] = Scheduler.current.now


def fail_in(owner, method, where):
    """Let a method of one object raise where it has to."""
    usual = getattr(owner, method)

    def call(*arguments):
        Faults.current.at(where)
        return usual(*arguments)

    setattr(owner, method, call)


def _hooked(models, numbers, hook):
    """``hook`` on the gradients of trained parameters with these numbers; what to remove at the end."""
    trained = [parameter for parameter in models.table.values() if parameter.requires_grad]
    return [trained[k % len(trained)].register_hook(hook) for k in numbers if trained]


def has_one_node(program):
    """Whether every rank sees the processes of all others."""
    return len(set(program.nodes)) == 1 and all(program.nodes)


def reduce_function(gradients, group):
    """A reduce function of the user's own."""
    Faults.current.at(Where.FUNCTION)
    gradients.divide(dist.get_world_size(group))
    work = dist.all_reduce(gradients.buffer(), group=group, async_op=True)
    Faults.current.at(Where.FUNCTION_LATE)
    return work


def packing():
    """A patch: packing raises where it has to."""
    packs = PackedBucket._pack

    def pack(self):
        Faults.current.at(Where.PACKING)
        return packs(self)

    return mock.patch.object(PackedBucket, "_pack", pack)
