"""Runs a measurement on ranks: on those that a launcher has started, or on new ones."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from torch import distributed as dist

from ppe_ddp.launch import init_process_group
from ppe_ddp.launchers import detect
from ppe_ddp.testing import Ranks

if TYPE_CHECKING:
    from collections.abc import Callable

DEFAULT_RANKS = 2


def measure_on_ranks(
    measure: Callable[..., Any], arguments: tuple[Any, ...], publish: Callable[[Any], None], *, ranks: int | None
) -> int:
    """Runs ``measure(*arguments)`` on every rank, in a process group, and hands rank 0's result to ``publish`` there.

    Args:
        measure: A function of a module, as new processes import it.
        arguments: The same on every rank.
        publish: Prints the result.
        ranks: How many to start, None for ``DEFAULT_RANKS``; where a launcher has started some, as many or None.

    Returns:
        0; 2 if there are not as many ranks as were asked for.
    """
    if detect(os.environ).launcher == "alone":
        with Ranks(ranks or DEFAULT_RANKS, timeout=3600, group_timeout=300) as started:
            publish(started.run(measure, *arguments)[0])
        return 0
    job = init_process_group(quiet=True)
    if ranks not in (None, job.world_size):
        print(f"ppe_ddp: --ranks is {ranks}, but there are {job.world_size}: leave it out", file=sys.stderr)
        return 2
    result = measure(*arguments)
    if job.rank == 0:
        publish(result)
    dist.destroy_process_group()
    return 0
