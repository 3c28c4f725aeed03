"""Reduce-scatter and all-gather of flat tensors, by whichever collective is the fastest on the backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import distributed as dist

from ppe_ddp.contracts import probe
from ppe_ddp.engine.group_duplicates import backends_of
from ppe_ddp.engine.memory import offers_memory
from ppe_ddp.errors import CommunicationError, PeerAbortedError
from ppe_ddp.scaling import scale

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.distributed import ProcessGroup

    from ppe_ddp.contracts import Waitable
    from ppe_ddp.engine.bucket import Bucket
    from ppe_ddp.engine.completion import Steps
    from ppe_ddp.engine.groups import Groups
    from ppe_ddp.engine.memory import MemoryPool

_HALVES = (torch.float16, torch.bfloat16)


class ReduceScatter:
    """A reduce-scatter of flat tensors on ``device``: each rank gets its part of the sum.

    gloo's takes as long as its all-reduce, or longer: 5.5 ms for 4 MiB on two ranks, where an all-to-all and a sum take
    2.7 (on four ranks 11.6 and 5.5), and a second buffer as large as the message until the result was waited for. Over
    mpi4py it is the other way around.
    """

    def __init__(self, groups: Groups, pool: MemoryPool, device: torch.device) -> None:
        self._groups = groups
        self._pool = pool
        self._world_size = groups.world_size
        self._by_all_to_all = backends_of(groups.buckets).get(device.type) == "gloo"
        # Whether what lies in the pool's memory goes faster than what lies elsewhere.
        self.from_pool = offers_memory(groups.buckets, device)

    def memory_for_share(self, flat: Tensor) -> Tensor:
        """Memory for this rank's part of the sum of ``flat``, of its dtype; with arbitrary contents."""
        return self._pool.take(flat.numel() // self._world_size, flat.dtype, flat.device)

    def start(self, share: Tensor, flat: Tensor, *, factor: float = 1.0, spare: bool = True) -> Waitable | None:
        """Begin to set ``share`` to ``factor`` times the sum over the ranks of this rank's part of ``flat``.

        Every rank must call this, with the same sizes and dtypes. The tensors must be left alone until the result
        was waited for.

        Args:
            share: 1-D, of the dtype of ``flat`` or wider; changed in place. It may be this rank's part of ``flat``.
            flat: 1-D, floating or complex, as many times the size of ``share`` as there are ranks: rank i's part is
                the i-th.
            factor: The same on every rank. Halves are multiplied by it before they are added up, or are added up in
                float32, lest the sum be too large.
            spare: Whether the contents of ``flat`` may be lost.

        Returns:
            What to wait for, once; None where one rank is alone.
        """
        if self._world_size == 1:
            scale(share, flat, factor)
            return None
        return (self._exchange if self._by_all_to_all else self._reduce)(share, flat, factor, spare)

    def finish(self, bucket: Bucket) -> Steps:
        """Wait for the reduce-scatter of ``bucket``; CommunicationError where the transport failed."""
        # Not a variable: a generator that nobody resumes would hold what is pending.
        if bucket.pending is None:
            return
        try:
            yield probe(bucket.pending)
            self._groups.failures.wait(bucket.pending, bucket.plan.device)
        except PeerAbortedError:
            raise
        except RuntimeError as error:
            raise self.failure(bucket, error) from error
        bucket.pending = None

    def failure(self, bucket: Bucket, error: RuntimeError) -> CommunicationError:
        """The error to raise for one of the transport."""
        return CommunicationError(
            f"rank {self._groups.rank}, bucket {bucket.plan.index} with {bucket.names[0]!r}: the reduce-"
            f"scatter failed: {error}. An error or a crash on another rank ends here: look for the first traceback of "
            "all ranks."
        )

    def _exchange(self, share: Tensor, flat: Tensor, factor: float, spare: bool) -> Waitable:
        received = self._pool.take(flat.numel(), flat.dtype, flat.device)
        # as bytes, since gloo does not know every dtype
        work = dist.all_to_all_single(
            received.view(torch.uint8), flat.view(torch.uint8), group=self._groups.buckets, async_op=True
        )
        return _Then(work, lambda: self._add_up(share, received.view(self._world_size, -1), factor))

    def _add_up(self, share: Tensor, rows: Tensor, factor: float) -> None:
        """Sum in the order of ranks."""
        is_half = share.dtype in _HALVES
        total = self._pool.take(share.numel(), torch.float32, share.device) if is_half else share
        scale(total, rows[0], factor)
        for row in rows[1:]:
            total.add_(row, alpha=factor)  # no pass of its own
        if is_half:
            share.copy_(total)

    def _reduce(self, share: Tensor, flat: Tensor, factor: float, spare: bool) -> Waitable:
        if flat.dtype in _HALVES:
            if self.from_pool and share.dtype not in _HALVES:
                # in memory that the ranks share, where no wire has to carry twice the bytes
                wide = self._pool.take(flat.numel(), share.dtype, flat.device)
                scale(wide, flat, factor)
                flat, factor = wide, 1.0
            elif factor != 1.0:
                scaled = flat if spare else torch.empty_like(flat)
                scale(scaled, flat, factor)
                flat, factor = scaled, 1.0
        received = share if flat.dtype is share.dtype else self._pool.take(share.numel(), flat.dtype, flat.device)
        function = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        work = function(received, flat, group=self._groups.buckets, async_op=True)
        if received is share and factor == 1.0:
            return work  # type: ignore[no-any-return]
        return _Then(work, lambda: scale(share, received, factor))


class _Then:
    """A Work with a function to call when it has completed."""

    def __init__(self, work: Waitable, finish: Callable[[], None]) -> None:
        self.work = work
        self._finish: Callable[[], None] | None = finish

    def is_completed(self) -> bool:
        return bool(self.work.is_completed())  # type: ignore[attr-defined]

    def wait(self) -> None:
        self.work.wait()
        finish, self._finish = self._finish, None
        if finish is not None:
            with torch.no_grad():
                finish()


def all_gather(flat: Tensor, share: Tensor, group: ProcessGroup, pool: MemoryPool | None = None) -> Waitable | None:
    """All-gather the shares of all ranks into ``flat``, 1-D, in their order; ``share`` may be this rank's part of it.

    A share is copied to the ``pool`` first where the group offers memory; there is no pool where it lies there already.
    Nothing is to be waited for where one rank is alone.
    """
    if dist.get_world_size(group) == 1:
        if share.data_ptr() != flat.data_ptr():
            flat.copy_(share)
        return None
    if pool is not None and offers_memory(group, share.device):
        share = pool.take(share.numel(), share.dtype, share.device).copy_(share)
    function = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return function(flat, share, group=group, async_op=True)  # type: ignore[no-any-return]
