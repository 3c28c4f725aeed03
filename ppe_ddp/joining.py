"""Uneven numbers of inputs, by torch's ``Join`` protocol: a rank without inputs contributes zeros."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from torch import distributed as dist
from torch.distributed.algorithms.join import JoinHook

from ppe_ddp.engine.module import local_tensor
from ppe_ddp.functions import broadcast

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from ppe_ddp.engine.bucket_synchronizer import BucketSynchronizer
    from ppe_ddp.engine.reducer import Reducer


def announce(reducer: Reducer[BucketSynchronizer], *, synchronizes: bool) -> None:
    """Tell the ranks that have joined whether this forward has a synchronized backward; does not wait."""
    word = torch.tensor([int(synchronizes)])
    dist.all_reduce(word, dist.ReduceOp.MAX, group=reducer.groups.control, async_op=True)


def _any_synchronizes(reducer: Reducer[BucketSynchronizer]) -> bool:
    """The other side of :func:`announce`, on a rank that has joined."""
    word = torch.tensor([0])
    dist.all_reduce(word, dist.ReduceOp.MAX, group=reducer.groups.control)
    return bool(word.item())


class DdpJoinHook(JoinHook):
    """Takes part in the synchronizations of a wrapper after this rank's inputs have ended.

    Args:
        reducer: The wrapper's reducer; None where nothing is synchronized.
        module: The wrapped module, whose final state all ranks shall have.
        divide_by_initial_world_size: Whether gradients are still divided by the number of all ranks, rather
            than by that of the ranks that have inputs.
        before: Called before each step, to bring the reducer up to date.
        with_buffer_hook: Whether a hook of the user's communicates in the forwards of the others.
    """

    def __init__(
        self,
        reducer: Reducer[BucketSynchronizer] | None,
        module: nn.Module,
        *,
        divide_by_initial_world_size: bool,
        before: Callable[[], object],
        with_buffer_hook: bool = False,
    ) -> None:
        super().__init__()
        if with_buffer_hook:
            raise RuntimeError(
                "join() is not for a wrapper with a buffer hook, which a rank that has run out does not call: give "
                "that rank finish_grad_sync() and a call of the hook instead"
            )
        if reducer is not None and reducer.synchronizer.sharded_parameters is not None:
            raise RuntimeError(
                f"rank {reducer.groups.rank}: join() is not for a model with a DistributedOptimizer, since a rank that "
                "has run out would leave its shards as they are: give it finish_grad_sync() and a step instead"
            )
        self._reducer = reducer
        self._module = module
        self._before = before
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ppe_ddp-join")
        self._step: Future[None] | None = None
        if reducer is not None:
            reducer.synchronizer.scale_by_active = not divide_by_initial_world_size

    def main_hook(self) -> None:
        """Take part in one synchronization of the other ranks, without gradients."""
        self._wait_for_step()
        if self._reducer is not None:
            # On a thread, since several wrappers may have joined: the others finish theirs in another order.
            self._step = self._thread.submit(self._take_part, self._reducer)

    def _take_part(self, reducer: Reducer[BucketSynchronizer]) -> None:
        self._before()
        if _any_synchronizes(reducer):
            reducer.finish(silent=True)

    def _wait_for_step(self) -> None:
        if self._step is not None:
            self._step.result()
            self._step = None

    def post_hook(self, is_last_joiner: bool) -> None:
        """Copy the module's state from a rank that went on to the end."""
        self._wait_for_step()
        self._thread.shutdown()
        reducer = self._reducer
        if reducer is None:
            return
        reducer.synchronizer.scale_by_active = False
        groups = reducer.groups
        last = torch.tensor([groups.rank if is_last_joiner else -1])
        dist.all_reduce(last, dist.ReduceOp.MAX, group=groups.control)
        state = [local_tensor(tensor).detach() for tensor in (*self._module.parameters(), *self._module.buffers())]
        pending = broadcast(state, groups.buckets, source=int(last.item()))
        if pending is not None:
            pending.wait()
        reducer.synchronizer.note_buffers()
