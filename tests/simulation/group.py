"""The wire between simulated ranks: what each has begun arrives when the scheduler delivers it.

Calls of one group arrive in their order on each rank; those of different groups, and of different ranks, in any. Sums
are made in the order of the ranks, so that they are the same bits as in one process.
"""

import torch
from torch import distributed as dist

from ppe_ddp.backends.work import Waits
from ppe_ddp.errors import CommunicationError

from .scheduler import Scheduler

_OPERATIONS = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.PRODUCT: torch.mul,
}
_LATE_SECONDS = 0.05  # most that a message is late: less than what the library waits for one in each of its waits
_OFTEN_LATE = 0.3


class _InFlight:
    """One rank's part in a collective; see :class:`ppe_ddp.waiting.InFlight`."""

    def __init__(self, output):
        self.output = output
        self.has_ended = False
        self._error = ""

    def end(self, error=""):
        self.has_ended, self._error, self.output = True, error, None

    def done(self):
        if self._error:
            raise CommunicationError(self._error)
        return self.has_ended

    def block(self):
        Scheduler.current.poll()


class _Collective:
    """One collective of all ranks of a group.

    Attributes:
        kind: What all ranks have to call alike: the name, the sizes and the root.
        sent: By rank, what it gives.
        parts: By rank, its part.
        result: What all receive alike, since the first one has; None where each receives something else.
    """

    def __init__(self, kind):
        self.kind = kind
        self.result = None
        self.sent = {}
        self.parts = {}


class _Channel:
    """What the ranks of one group have called, in order."""

    def __init__(self, name, size):
        self.name, self.size = name, size
        self.calls = []
        self.begun = [0] * size  # how many each has begun
        self.ended = [0] * size  # how many have ended on each
        self.job_ranks = {}  # by rank, of those that have come
        self.closed = set()
        self.cut = set()  # ranks that have given their connections up: what they had sent may be lost
        self.dead = set()
        self._delivering = set()  # ranks for which a delivery is under way

    def begin(self, rank, kind, sent, output):
        """Begin the next collective of ``rank``."""
        number = self.begun[rank]
        self.begun[rank] += 1
        if number == len(self.calls):
            self.calls.append(_Collective(kind))
        call = self.calls[number]
        if call.kind != kind:
            Scheduler.current.fail(f"{self.name}, call {number}: rank {rank} calls {kind}, and others {call.kind}")
        call.sent[rank] = sent
        call.parts[rank] = part = _InFlight(output)
        self.advance()
        return part

    def close(self, rank, *, dies=False):
        """``rank`` begins nothing any more; what all have begun still arrives, unless it dies or gives up."""
        (self.dead if dies else self.closed).add(rank)
        if rank in self.closed:
            for number in range(self.ended[rank], self.begun[rank]):
                self._give_up(rank, self.calls[number].parts[rank])
            self.ended[rank] = self.begun[rank]
        self.advance()

    def _give_up(self, rank, part):
        """End a call whose connections are closed: some time later, until which it may write into its memory."""
        scheduler = Scheduler.current

        def end():
            if part.output is not None and part.output.is_floating_point():
                with torch.no_grad():
                    part.output.fill_(float("nan"))
            part.end("the connections were given up here")
            scheduler.change(self.job_ranks[rank])

        scheduler.after(scheduler.draw.random() * _LATE_SECONDS, end)

    def advance(self):
        """Let what can arrive be under way."""
        scheduler = Scheduler.current
        for rank in range(self.size):
            number = self.ended[rank]
            if number == self.begun[rank] or rank in self._delivering or rank in self.dead:
                continue
            missing = self._missing(self.calls[number], rank)
            if missing and not missing & Network.current.seen(self):
                continue
            self._delivering.add(rank)
            late = scheduler.draw.random() < _OFTEN_LATE
            seconds = scheduler.draw.random() * (_LATE_SECONDS if late else 1e-5)
            scheduler.after(seconds, lambda rank=rank, number=number: self._deliver(rank, number))

    def _missing(self, call, rank):
        """The ranks without whose part the call cannot end on ``rank``."""
        if len(call.sent) == self.size:
            return set()
        name, _, root = call.kind
        needed = range(self.size) if name != "broadcast" else ([] if rank == root else [root])
        return set(needed) - call.sent.keys()

    def _deliver(self, rank, number):
        scheduler = Scheduler.current
        self._delivering.discard(rank)
        if self.ended[rank] == number:  # else it has closed meanwhile
            call = self.calls[number]
            part = call.parts[rank]
            gone = self._missing(call, rank)
            self.ended[rank] += 1
            scheduler.log.append((scheduler.now, rank, ("arrives", self.name, number, call.kind, *gone)))
            lossy = self.dead if Network.current.is_silent else self.dead | (self.cut - {rank})
            if gone or (lossy and scheduler.draw.random() < 0.5):
                part.end(f"connection closed by peer {sorted(gone or lossy)}")
            else:
                if torch.is_grad_enabled():
                    with torch.no_grad():
                        _finish(call, rank, part.output)
                else:
                    _finish(call, rank, part.output)
                part.end()
            scheduler.change(self.job_ranks[rank])
        self.advance()


def _finish(call, rank, output):
    """Put the result of ``call`` where ``rank`` wants it."""
    name, _, detail = call.kind
    if name == "all_reduce":
        if call.result is None:
            call.result = call.sent[0]
            for other in range(1, len(call.sent)):
                call.result = _OPERATIONS[detail](call.result, call.sent[other])
        output.copy_(call.result)
    elif name == "broadcast":
        if rank != detail:
            output.copy_(call.sent[detail])
    elif name == "all_gather":
        if call.result is None:
            call.result = torch.cat([call.sent[other] for other in range(len(call.sent))])
        output.copy_(call.result)
    elif name == "all_to_all":
        parts = []
        for other in range(len(call.sent)):
            flat, sending = call.sent[other]
            parts.append(flat.narrow(0, sum(sending[:rank]), sending[rank]))
        output.copy_(torch.cat(parts))


class Network:
    """The channels of one history, by name.

    Args:
        is_silent: Whether nobody sees that another rank, which lives, has closed its connections.
        is_mute: Whether a group does not tell the others that it was given up, nor look for dead ranks, as torch's over
            gloo: what the engine sees by itself has to do.
        is_blind: Whether nobody sees that the connections of a rank that dies are closed, as over MPI.
    """

    current = None

    def __init__(self, is_silent, is_mute, is_blind):
        self.channels, self.is_silent, self.is_mute, self.is_blind = {}, is_silent, is_mute, is_blind

    def seen(self, channel):
        """The ranks of a channel of which the others see that they have closed it."""
        dead = set() if self.is_blind else channel.dead
        return dead if self.is_silent else channel.closed | dead

    def die(self, rank):
        """Close every connection of ``rank``, without a word."""
        for channel in self.channels.values():
            for member, job_rank in channel.job_ranks.items():
                if job_rank == rank:
                    channel.close(member, dies=True)


class SimulatedWaits(Waits):
    """Waits of a group whose network may be mute."""

    def is_given_up(self):
        return bool(self.failure) if Network.current.is_mute else super().is_given_up()

    def _look_for_ended(self, what, absent):
        if not Network.current.is_mute:
            super()._look_for_ended(what, absent)


class SimulatedWire:
    """See :class:`~ppe_ddp.backends.wire.Wire`; its ranks are tasks of the scheduler."""

    dtypes = frozenset((torch.float32, torch.float64, torch.uint8, torch.int8, torch.int32, torch.int64))
    piece_bytes = 0
    largest_tag = 1 << 30

    def __init__(self, arguments, keys):
        self.size, self._rank = arguments.group_size, arguments.group_rank
        name = f"{arguments.group_id} {keys.note('')}"
        self._channel = Network.current.channels.setdefault(name, _Channel(name, self.size))
        self._channel.job_ranks[self._rank] = Scheduler.current.task.rank
        self._parts = []

    @classmethod
    def of(cls, pairs, _place=""):
        """Instead of gloo's."""
        return cls(*pairs[0])

    @property
    def is_idle(self):
        """Whether nothing is under way."""
        return all(part.has_ended for part in self._parts)

    def _begin(self, name, size, detail, sent, output):
        if self._rank in self._channel.closed:
            raise CommunicationError("the connections were given up")
        Scheduler.current.note("begins", self._channel.name, self._channel.begun[self._rank], name, size)
        Scheduler.current.interrupt()
        part = self._channel.begin(self._rank, (name, size, detail), sent, output)
        self._parts = [one for one in self._parts if not one.has_ended]
        self._parts.append(part)
        return part

    def all_reduce(self, flat, kind):
        """See :meth:`Wire.all_reduce`; what is under way is no number, so that nobody takes it for a result."""
        sent = flat.clone()
        part = self._begin("all_reduce", flat.numel(), kind, sent, flat)
        if flat.is_floating_point() and not part.has_ended:
            flat.fill_(float("nan"))
        return part

    def broadcast(self, flat, root):
        """See :meth:`Wire.broadcast`."""
        flat = flat.view(torch.uint8)
        return self._begin("broadcast", flat.numel(), root, flat.clone(), flat)

    def all_gather(self, rows, flat):
        """See :meth:`Wire.all_gather`."""
        rows, flat = rows.view(-1).view(torch.uint8), flat.view(-1).view(torch.uint8)
        return self._begin("all_gather", flat.numel(), None, flat.clone(), rows)

    def all_to_all(self, output, flat, receiving, sending):
        """See :meth:`Wire.all_to_all`."""
        return self._begin("all_to_all", None, flat.dtype, (flat.clone(), list(sending)), output)

    def barrier(self):
        """See :meth:`Wire.barrier`."""
        return self._begin("barrier", 0, None, None, None)

    def close(self):
        """See :meth:`Wire.close`."""
        self._channel.close(self._rank)

    def give_up(self):
        """See :meth:`Wire.give_up`."""
        self._channel.cut.add(self._rank)
        self.close()
