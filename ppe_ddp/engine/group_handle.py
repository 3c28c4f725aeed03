"""A handle on the user's process group that survives copying and pickling, which connections do not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import distributed as dist

from ppe_ddp.backends.group_internals import default_group, is_registered, registered_groups

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class GroupHandle:
    """Holds a process group in a module that may be copied or pickled.

    A copy in the same process shares the group. In another process it is found again by its ranks, when it
    is first needed.
    """

    def __init__(self, group: ProcessGroup | None, ranks: list[int] | None = None) -> None:
        self._group = group
        self._ranks = ranks

    def group(self) -> ProcessGroup:
        """The group; the default group if none was named.

        Raises:
            ValueError: This process has no group of these ranks.
        """
        if self._group is not None:
            return self._group
        if self._ranks is not None:
            for group, ranks in registered_groups():
                if ranks == self._ranks:
                    return group
            raise ValueError(
                f"the unpickled wrapper wants a process group of ranks {self._ranks}, and there is none: make it with "
                "torch.distributed.new_group() first"
            )
        return default_group()

    def __deepcopy__(self, memo: dict[int, object]) -> GroupHandle:
        """The handle itself: a group is a connection, not a value."""
        return self

    def __reduce__(self) -> tuple[type[GroupHandle], tuple[None, list[int] | None]]:
        """Only the ranks are pickled, and none for the default group."""
        group = self._group
        if group is None or group is dist.group.WORLD or not is_registered(group):
            return GroupHandle, (None, self._ranks)
        return GroupHandle, (None, dist.get_process_group_ranks(group))
