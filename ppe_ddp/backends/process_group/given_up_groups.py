"""Process groups that this rank has given up: their connections end soon, whatever is under way in them."""

from __future__ import annotations

import threading
import weakref
from time import monotonic, sleep

from torch.distributed import ProcessGroup

from ppe_ddp.backends.group_internals import abort_of_gloo

CLOSING_THREAD = "ppe_ddp-close"
_COMPLETING_SECONDS = 5.0


def close_given_up(groups: list[ProcessGroup]) -> None:
    """Let go of these, and abort those that are over gloo where something is under way; empties the list.

    What all ranks have begun has five seconds to complete: torch frees memory of a large all-gather that is aborted
    before gloo has let go of it. What some have not begun never is.

    By threads of its own: the end of a group waits for what is under way in it.
    """
    ending = groups.copy()
    groups.clear()
    threading.Thread(target=_close, args=(ending,), name=CLOSING_THREAD, daemon=True).start()


def _close(groups: list[ProcessGroup]) -> None:
    until = monotonic() + _COMPLETING_SECONDS
    aborts = [abort_of_gloo(group) for group in groups if type(group) is ProcessGroup]  # others end by themselves
    alive = [weakref.ref(group) for group in groups]
    ending = threading.Thread(target=groups.clear, name=CLOSING_THREAD, daemon=True)
    ending.start()
    ending.join(_COMPLETING_SECONDS)
    # Where somebody else has one, as a traceback does, it has not ended.
    if aborts and any(group() is not None for group in alive):
        sleep(max(0.0, until - monotonic()))
    for abort in aborts:
        abort()
