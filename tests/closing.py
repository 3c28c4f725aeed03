"""What is under way when connections of gloo end, and the threads that end them."""

import threading

import torch
import torch.distributed as dist

_NAMES = ("ppe_ddp-close", "ppe_ddp-message")


def calls_that_no_rank_ends(group):
    """Begin more than gloo runs at once on this rank, each of a kind that no other rank calls."""
    rank, size, one = dist.get_rank(), dist.get_world_size(), torch.ones(1)
    if rank == 0:
        works = [dist.all_reduce(torch.ones(1), group=group, async_op=True) for _ in range(3)]
    elif rank == 1:
        works = [dist.broadcast(torch.ones(1), 0, group=group, async_op=True) for _ in range(3)]
    else:
        rows = [[torch.ones(1) for _ in range(size)] for _ in range(3)]
        works = [dist.all_gather(parts, one, group=group, async_op=True) for parts in rows]
    return [*works, dist.irecv(torch.ones(1), (rank + 1) % size, group)]


def await_closing(seconds=10.0):
    """Wait until the threads have ended: gloo has nothing under way for them then."""
    threads = [thread for thread in threading.enumerate() if thread.name in _NAMES]
    for thread in threads:
        thread.join(seconds)
    assert not [thread for thread in threads if thread.is_alive()]
