"""The duplicates of a group that no wrapper uses: taken again by the next one, or closed where a rank has failed.

Garbage is collected at different moments on different ranks, and a rank may have failed in the last step of a wrapper,
after the others were through: whenever they ask for duplicates, they say what each has, and do the same with them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence


class Duplicates(Protocol):
    """The duplicates that one wrapper uses, with the same ``number`` on every rank."""

    number: int
    is_closed: bool
    shared_memory: bool

    def end_together(self) -> None:
        """Give back what these have, which no rank uses any more; every rank must call this together."""
        ...


T = TypeVar("T", bound=Duplicates)


@dataclass
class GroupPool(Generic[T]):
    """The duplicates of one parent: how many there are, and those that no wrapper of this process uses.

    Attributes:
        calls: How often the ranks have asked one another for duplicates.
        count: How many were made.
        idle: Those that can be used.
        closed: Those in which this rank has failed, and which no wrapper will connect again.
    """

    calls: int = 0
    count: int = 0
    idle: list[T] = field(default_factory=list)
    closed: list[T] = field(default_factory=list)

    def put(self, groups: T) -> None:
        """Keep what a wrapper has used; nothing is in flight in it."""
        (self.closed if groups.is_closed else self.idle).append(groups)

    def numbers(self) -> list[list[int]]:
        """Of those that are idle, and of those that are closed; for the other ranks."""
        return [[groups.number for groups in self.idle], [groups.number for groups in self.closed]]

    def end_closed(self, known: Sequence[Sequence[Sequence[int]]]) -> None:
        """Close everywhere what a rank has closed, once no rank uses it; every rank must call this together.

        Args:
            known: The :meth:`numbers` of all ranks.

        Raises:
            CommunicationError: Not all ranks have come.
        """
        unused = set.intersection(*({*idle, *closed} for idle, closed in known))
        for number in sorted(unused & {number for _, closed in known for number in closed}):
            for kept in (self.idle, self.closed):
                groups = _pop(kept, number)
                if groups is not None:
                    groups.end_together()

    def take(self, known: Sequence[Sequence[Sequence[int]]], *, shared_memory: bool) -> T | None:
        """Those that are idle on all ranks, the first ones; None if there are none of that kind.

        Args:
            known: The :meth:`numbers` of all ranks.
            shared_memory: Whether they are to be over shared memory; the same on all ranks.
        """
        common = set.intersection(*({*idle} for idle, _ in known))
        fitting = [one.number for one in self.idle if one.number in common and one.shared_memory == shared_memory]
        return _pop(self.idle, min(fitting)) if fitting else None


def _pop(kept: list[T], number: int) -> T | None:
    for groups in kept:
        if groups.number == number:
            kept.remove(groups)
            return groups
    return None
