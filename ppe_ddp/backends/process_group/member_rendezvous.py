"""Rendezvous of the ranks that make one group: they meet in its store, and whoever waits for them keeps the rest going.

A store's own ``wait()`` names nobody and lets stand still what other groups of this process have under way.
"""

from __future__ import annotations

import json
import os
from time import monotonic
from typing import TYPE_CHECKING, Any, NoReturn

from ppe_ddp.backends.process_group.progress_engine import progress_engine
from ppe_ddp.errors import CommunicationError, DisagreementError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ppe_ddp.backends.process_group.written_keys import WrittenKeys

_ASK_SECONDS = 0.001


def await_members(arguments: Any, ranks: Sequence[int], options: object, store: WrittenKeys) -> int:
    """Wait until all ``ranks`` make this group, which a transport itself may wait for without an end.

    Keeps going what is under way on other groups, which a rank may need to get here.

    Args:
        arguments: torch's ``_DistributedBackendOptions``.
        ranks: Of the world, in the order of the group.
        options: What they must all make it with; compared by its text, as is whether collectives are compared.
        store: That the ranks share, under the name of the group.

    Returns:
        How many groups of this name there have been, with this one: keys in the store of those before are still there.

    Raises:
        CommunicationError: Some have not come within the group's timeout; names them.
        DisagreementError: On every rank: not all have the same options.
    """
    place, seconds = arguments.group_rank, arguments.timeout.total_seconds()
    turn = _first_unused(lambda turn: store.check([f"ppe_ddp/made/{turn}"]))
    keys = [f"ppe_ddp/makes/{turn}/{other}" for other in range(len(ranks))]
    differing = f"ppe_ddp/options/{turn}/differing"
    with_what = f"{options} and PPE_DDP_DEBUG={os.environ.get('PPE_DDP_DEBUG', '')}"
    own = json.dumps([ranks[place], with_what])
    first = store.compare_set(f"ppe_ddp/options/{turn}", "", own)  # that of whoever came first
    if json.loads(first)[1] != with_what:
        store.set(differing, own)
    store.set(keys[place], "1")  # last: when all have come, all have compared
    start = monotonic()

    def is_made(outcome: str) -> bool:
        # What one rank says first holds for all: nobody begins to connect to a rank that has given up just now.
        return bool(store.compare_set(f"ppe_ddp/made/{turn}", "", outcome) == b"yes")

    def look() -> None:
        if monotonic() - start > seconds and not is_made("no"):
            refuse()

    are_here = paced(lambda: store.check(keys))

    def arrived() -> bool:
        return are_here() and (is_made("yes") or refuse())

    def refuse() -> NoReturn:
        absent = [str(rank) for rank, key in zip(ranks, keys, strict=True) if not store.check([key])]
        who = ", ".join(absent) or "that came too late"
        raise CommunicationError(
            f"rank {ranks[place]}: making group {arguments.group_id!r} of ranks {list(ranks)} has waited for the "
            f"group's timeout of {seconds:g} s: rank {who} did not make it. Where "
            "only its ranks make a group (use_local_synchronization=True), torch names it by how many groups a "
            "process has, so each of them must have made equally many; else all ranks of the job call new_group()"
        )

    progress_engine(os.getpid()).wait_until(arrived, look)
    if store.check([differing]):
        (one, its), (other, others) = sorted([json.loads(first), json.loads(store.get(differing))])
        raise DisagreementError(
            f"group {arguments.group_id!r} of ranks {list(ranks)}: rank {one} makes it with {its}, and rank {other} "
            f"with {others}. Give the same on every rank"
        )
    return turn


def _first_unused(is_used: Callable[[int], bool]) -> int:
    """The first turn that no group of this name has had, which was destroyed or given up; they come in order."""
    used, unused = 0, 1
    while is_used(unused):
        used, unused = unused, 2 * unused
    while unused - used > 1:
        middle = (used + unused) // 2
        used, unused = (middle, unused) if is_used(middle) else (used, middle)
    return unused


def paced(question: Callable[[], bool]) -> Callable[[], bool]:
    """The same question to a store, asked once a millisecond at most: it may be far, and all ranks ask it."""
    asked = 0.0

    def ask() -> bool:
        nonlocal asked
        now = monotonic()
        if now - asked < _ASK_SECONDS:
            return False
        asked = now
        return question()

    return ask
