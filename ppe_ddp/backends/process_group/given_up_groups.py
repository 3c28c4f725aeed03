"""Process groups that this rank has given up: their connections end at once, whatever is under way in them."""

from __future__ import annotations

import threading

from torch.distributed import ProcessGroup

from ppe_ddp.backends.group_internals import abort_gloo


def close_given_up(groups: list[ProcessGroup]) -> None:
    """Abort those that are over gloo, and let go of all of them; empties the list.

    By a thread of its own: it takes some milliseconds, and the caller may hold a lock that what fails then needs.
    """
    ending = groups.copy()
    groups.clear()
    threading.Thread(target=_close, args=(ending,), name="ppe_ddp-close", daemon=True).start()


def _close(groups: list[ProcessGroup]) -> None:
    while groups:
        if type(groups[-1]) is ProcessGroup:  # one that is written in Python ends by itself
            abort_gloo(groups[-1])
        groups.pop()
