"""Several things in flight that are waited for as one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ppe_ddp.contracts import probe

if TYPE_CHECKING:
    from ppe_ddp.contracts import Waitable


class AllPending:
    """Several things in flight, waited for as one.

    Args:
        parts: These.

    Attributes:
        parts: The same.
    """

    def __init__(self, parts: list[Waitable]) -> None:
        self.parts = parts

    def is_completed(self) -> bool:
        """Whether all of them are; asks each, since asking may be what advances it."""
        return all([is_completed(one) for one in self.parts])

    def wait(self) -> None:
        """Wait for one after another."""
        for one in self.parts:
            one.wait()


def is_completed(pending: Waitable) -> bool:
    """Whether waiting would return at once, without waiting."""
    is_done = probe(pending)
    return is_done is None or bool(is_done())
