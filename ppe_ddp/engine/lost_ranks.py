"""Names the ranks that a failed collective was waiting for: those that are gone, are stopped, or have not come.

on this node       at once: their processes are looked at (peer_processes.py)
on other nodes     every rank whose communication has failed writes to the store that it is there, what it has
                   done last, and which processes of its own node do not run; one that does not write is silent
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from torch import distributed as dist

from ppe_ddp.backends.rank_store import Reports
from ppe_ddp.engine.peer_processes import Activity, Condition, Position
from ppe_ddp.errors import CommunicationError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ppe_ddp.backends.rank_store import BoundedStore
    from ppe_ddp.engine.peer_processes import PeerProcesses

# A connection is closed a moment before the system lets anybody see that its process is no more.
_HERE_SECONDS = 0.5
_ELSEWHERE_SECONDS = 1.0  # a failure reaches all ranks that wait at about the same time
_NAP_SECONDS = 0.01
_SHORT_NAP_SECONDS = 0.0005
_COMPLETING_SECONDS = 5.0  # for the others to complete a step of which this one has sent its part
_ARRIVING_SECONDS = 0.3  # the same where they cannot be seen
_SILENT = "does not answer"
_LATE = "has not come"


@dataclass(frozen=True)
class LostRank:
    """A rank that others have waited for in vain.

    Attributes:
        rank: The rank.
        condition: What is the matter with it, as a clause without a subject.
        step: The step in which it was seen last.
        phase: What it has done last in it.
        last: The same, as a clause without a subject; empty where it is not known.
        is_gone: Whether it will not come any more.
    """

    rank: int
    condition: str
    step: int | None = None
    phase: str = ""
    last: str = ""
    is_gone: bool = False

    def __str__(self) -> str:
        """For an error."""
        last = f" (it {self.last})" if self.last else ""
        return f"rank {self.rank}, which {self.condition}{last}"


class LostRanks:
    """Looks for the ranks of one group that are lost, for as long as its connections last.

    Args:
        store: Shared by the ranks.
        name: Of the connections; the same on every rank, and never used again.
        rank: This process in the group.
        world_size: The size of the group.
        processes: Of its ranks, as far as they can be seen.
    """

    def __init__(self, store: BoundedStore, name: str, rank: int, world_size: int, processes: PeerProcesses) -> None:
        self._reports = Reports(store, f"ppe_ddp/present/{name}")
        self._rank = rank
        self._processes = processes
        self._elsewhere = set(range(world_size)) - {rank, *processes.on_this_node}

    def gone(self) -> list[LostRank]:
        """The ranks that are known not to come any more; found out at once."""
        here = self._not_running()
        if self._elsewhere and not here:
            with suppress(dist.DistError, CommunicationError):
                here = [LostRank(**one) for record in self._told().values() for one in record["lost"]]
        return [one for one in here if one.is_gone]

    def find(self, explained: Callable[[], bool] = lambda: False) -> list[LostRank]:
        """The ranks that this one has waited for, now that its communication has failed.

        Args:
            explained: Asked now and then: whether the failure has another reason, so that nobody need be found.
        """
        end = monotonic() + (_ELSEWHERE_SECONDS if self._elsewhere else _HERE_SECONDS)
        told: dict[int, dict[str, Any]] = {}
        said: list[LostRank] | None = None
        with suppress(dist.DistError, CommunicationError):  # without the store, what can be seen here must do
            while not explained():
                here = self._not_running()
                if self._elsewhere:
                    if here != said:
                        self._tell(here)
                        said = here
                    told = self._told()
                found = here or [LostRank(**one) for record in told.values() for one in record["lost"]]
                if found:  # perhaps a rank that has failed before it left, and so has said why
                    return [] if explained() else found
                if monotonic() > end or (self._elsewhere and len(told) == len(self._elsewhere)):
                    break
                sleep(_NAP_SECONDS)
        if explained():
            return []
        return self._not_running() or self._silent(told) or self._behind(told)

    def note_wait(self) -> None:
        """This rank has waited for others for a while."""
        self._processes.note_wait()

    def await_completion(self, advance: Callable[[], object]) -> None:
        """Let the other ranks complete the last step that is complete here, before this one closes its connections.

        They may still be receiving what this rank has sent in it, and closing would end that as well: it would have
        taken the step, and they not.

        Args:
            advance: Moves what is under way in the group.
        """
        begin = monotonic()
        own = self._processes.position(self._rank)
        has_met = own is None or own.activity in (Activity.BUCKET, Activity.VOTE, Activity.LATE_BUCKET)
        # Who is at a bucket has heard of all: they have begun the step, and so completed the one before.
        unseen = _ARRIVING_SECONDS if self._elsewhere and not has_met else 0.0
        while monotonic() - begin < unseen or (
            self._processes.completing() and monotonic() - begin < _COMPLETING_SECONDS
        ):
            advance()
            sleep(_SHORT_NAP_SECONDS)

    def leave(self) -> None:
        """This process is about to end: say so, and of which error if that is known."""
        error = getattr(sys, "last_value", None)
        text = f"an error that nobody has caught, {type(error).__name__}: {error}" if error is not None else ""
        self._processes.leave(text)
        if self._elsewhere:
            own = self._processes.position(self._rank)
            with suppress(dist.DistError, CommunicationError):
                self._tell([self._lost(self._rank, _said(Condition.LEFT, text), own, is_gone=True)])

    def behind(self, ranks: Sequence[int]) -> list[LostRank]:
        """These ranks, which have not come, with what can be seen of them."""
        found = {one.rank: one for one in self._not_running()}
        return [found.get(rank) or self._lost(rank, _LATE, self._processes.position(rank)) for rank in ranks]

    def _not_running(self) -> list[LostRank]:
        found = []
        for rank, (condition, text) in self._processes.lost().items():
            said = _said(condition, text)
            is_gone = condition is not Condition.STOPPED
            found.append(self._lost(rank, said, self._processes.position(rank), is_gone=is_gone))
        return found

    def _tell(self, lost: list[LostRank]) -> None:
        record = {"position": self._processes.position(self._rank), "lost": [asdict(one) for one in lost]}
        self._reports.append(json.dumps([self._rank, record]))

    def _told(self) -> dict[int, dict[str, Any]]:
        """What ranks of other nodes have said last."""
        told: dict[int, dict[str, Any]] = dict(json.loads(text) for text in self._reports.look())
        return {rank: record for rank, record in told.items() if rank in self._elsewhere}

    def _silent(self, told: dict[int, dict[str, Any]]) -> list[LostRank]:
        return [LostRank(rank, _SILENT) for rank in sorted(self._elsewhere - told.keys())]

    def _behind(self, told: dict[int, dict[str, Any]]) -> list[LostRank]:
        """The ranks that have come less far than this one: it waits for them, or they for each other."""
        own = self._processes.position(self._rank)
        if own is None:
            return []
        positions = {rank: self._processes.position(rank) for rank in self._processes.on_this_node}
        for rank, record in told.items():
            if record["position"] is not None:
                step, activity, bucket, waits = record["position"]
                positions[rank] = Position(step, Activity(activity), bucket, waits)
        late = {rank: position for rank, position in positions.items() if position is not None and position < own}
        return [self._lost(rank, _LATE, position) for rank, position in sorted(late.items())]

    def _lost(self, rank: int, condition: str, position: Position | None, *, is_gone: bool = False) -> LostRank:
        if position is None:
            return LostRank(rank, condition, is_gone=is_gone)
        return LostRank(rank, condition, position.step, position.phase, str(position), is_gone)


def _said(condition: Condition, text: str) -> str:
    return f"{condition.value} by {text}" if text else condition.value
