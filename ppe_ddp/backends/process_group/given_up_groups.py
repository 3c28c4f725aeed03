"""Process groups that this rank has given up: their connections end soon, whatever is under way in them."""

from __future__ import annotations

import threading

from torch.distributed import ProcessGroup

from ppe_ddp.backends.group_internals import abort_of_gloo

CLOSING_THREAD = "ppe_ddp-close"
# What all ranks have begun may be completed: torch frees memory of a large all-gather that fails before gloo has let
# go of it. What some have not begun never is.
_COMPLETING_SECONDS = 2.0


def close_given_up(groups: list[ProcessGroup]) -> None:
    """Let go of these, and abort those that are over gloo where something is under way; empties the list.

    By threads of its own: the end of a group waits for what is under way in it.
    """
    ending = groups.copy()
    groups.clear()
    threading.Thread(target=_close, args=(ending,), name=CLOSING_THREAD, daemon=True).start()


def _close(groups: list[ProcessGroup]) -> None:
    aborts = [abort_of_gloo(group) for group in groups if type(group) is ProcessGroup]  # others end by themselves
    ending = threading.Thread(target=groups.clear, name=CLOSING_THREAD, daemon=True)
    ending.start()
    ending.join(_COMPLETING_SECONDS)
    for abort in aborts:
        abort()
