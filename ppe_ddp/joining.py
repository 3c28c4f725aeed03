"""Uneven numbers of inputs, by torch's ``Join`` protocol: a rank without inputs contributes zeros."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.algorithms.join import JoinHook

from ppe_ddp.engine.groups import Groups
from ppe_ddp.engine.module import ModuleState, local_tensor
from ppe_ddp.engine.reducer import Reducer
from ppe_ddp.engine.synchronizer import BucketSynchronizer
from ppe_ddp.errors import CommunicationError, NonFiniteGradientError, PeerAbortedError, UnusableError
from ppe_ddp.functions import broadcast
from ppe_ddp.torch_internals import uncompiled_hook


def _announce(groups: Groups) -> None:
    """Tell the ranks that have run out, before the first message, that a synchronization begins; does not wait."""
    with suppress(CommunicationError):  # the mask uses the same connections and fails as well
        dist.all_reduce(torch.tensor([1], device="cpu"), dist.ReduceOp.MAX, group=groups.control, async_op=True)


def _any_announces(groups: Groups) -> bool:
    """Wait for :func:`_announce` of any rank, on a rank that has run out; False once all ranks have run out."""
    word = torch.tensor([0], device="cpu")
    work = dist.all_reduce(word, dist.ReduceOp.MAX, group=groups.control, async_op=True)
    groups.failures.wait(work, word.device)  # looks for failures, which the transport may not notice
    return bool(word.item())


def _own_streams(parameters: Iterable[Tensor]) -> list[torch.cuda.Stream]:
    """A stream for each GPU of the parameters, behind this thread's present work.

    The thread's own streams will wait for the sum in which torch counts the ranks, and so for all other ranks.
    """
    streams = [torch.cuda.Stream(device) for device in {one.device for one in parameters if one.is_cuda}]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream(stream.device))
    return streams


def leave_join(synchronizer: BucketSynchronizer) -> None:
    """End what :class:`DdpJoinHook` has begun: forwards no longer tell of themselves in the user's group."""
    synchronizer.scale_by_active, synchronizer.announce = False, None


class DdpJoinHook(JoinHook):
    """Takes part in the synchronizations of a wrapper after this rank's inputs have ended.

    It calls ``before`` before each step, which brings the reducer up to date; ``module_state`` then returns what there
    is to synchronize. ``reducer`` is None if torch.distributed is not initialized; then it does nothing.
    """

    @uncompiled_hook
    def __init__(
        self,
        reducer: Reducer[BucketSynchronizer] | None,
        module_state: Callable[[], ModuleState],
        *,
        divide_by_initial_world_size: bool,
        before: Callable[[], object],
    ) -> None:
        super().__init__()
        if reducer is not None and reducer.synchronizer.sharded_parameters is not None:
            raise UnusableError(
                f"rank {reducer.groups.rank}: join() is not for a model with a DistributedOptimizer, since a rank that "
                "has run out would leave its shards as they are: give it finish_grad_sync() and a step instead"
            )
        if reducer is not None and reducer.groups.parent.group_name in reducer.synchronizer.turns:
            raise UnusableError(
                f"rank {reducer.groups.rank}: {reducer.synchronizer.reduction.title} communicates in the process group "
                "in which torch's Join counts the ranks that have inputs, at the same time, so that messages would "
                "meet: give the hook a group of its own (torch.distributed.new_group() as its state)"
            )
        self._reducer = reducer
        self._module_state = module_state
        self._before = before
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ppe_ddp-join")
        self._listening: Future[None] | None = None
        if reducer is not None:
            reducer.synchronizer.scale_by_active = not divide_by_initial_world_size
            reducer.synchronizer.announce = self._announce = partial(_announce, reducer.groups)

    def __del__(self) -> None:
        """Leave a ``Join`` that has ended by an exception, after which torch calls no hook."""
        reducer = getattr(self, "_reducer", None)
        if reducer is not None and reducer.synchronizer.announce is self._announce:
            leave_join(reducer.synchronizer)

    @uncompiled_hook
    def main_hook(self) -> None:
        """Take part in all synchronizations of the other ranks from now on, any number for each forward."""
        if self._listening is not None:
            if self._listening.done():
                self._listening.result()  # raises the error of the thread
        elif self._reducer is not None:
            # A thread for each wrapper: other ranks may synchronize several joined wrappers in any order.
            streams = _own_streams(self._module_state().parameters)
            self._listening = self._thread.submit(self._listen, self._reducer, streams)

    def _listen(self, reducer: Reducer[BucketSynchronizer], streams: Sequence[torch.cuda.Stream]) -> None:
        with ExitStack() as stack:
            for stream in streams:
                stack.enter_context(torch.cuda.stream(stream))
            while self._hears(reducer):
                with suppress(PeerAbortedError, NonFiniteGradientError):  # the other ranks skip that step and go on
                    reducer.finish(silent=True)
        for stream in streams:
            stream.synchronize()

    def _hears(self, reducer: Reducer[BucketSynchronizer]) -> bool:
        """Wait for the next synchronization; False once all ranks have run out. After a failure it connects again."""
        while True:
            self._before()
            reducer.synchronizer.connect_again()
            try:
                return _any_announces(reducer.groups)
            except Exception as error:
                told = reducer.groups.fail(error, "begun") or error
                if not isinstance(told, PeerAbortedError):
                    raise told from error
                if told.step is not None and told.step > reducer.groups.step:
                    reducer.groups.step += 1  # the failed step, which was not announced here

    @uncompiled_hook
    def post_hook(self, is_last_joiner: bool) -> None:
        """Copy the module's state from a rank that has trained to the end."""
        if self._listening is not None:
            self._listening.result()
        elif self._reducer is not None:
            self._hears(self._reducer)  # False: it lets the listening ranks stop
        self._thread.shutdown()
        reducer = self._reducer
        if reducer is None:
            return
        leave_join(reducer.synchronizer)
        groups, module_state = reducer.groups, self._module_state()
        last = torch.tensor([groups.rank if is_last_joiner else -1], device="cpu")
        dist.all_reduce(last, dist.ReduceOp.MAX, group=groups.control)
        tensors = (*module_state.parameters, *module_state.buffers().values())
        state = [local_tensor(tensor).detach() for tensor in tensors]
        pending = broadcast(state, groups.buckets, source=int(last.item()))
        if pending is not None:
            pending.wait()
        groups.await_start()
        reducer.synchronizer.note_buffers()
