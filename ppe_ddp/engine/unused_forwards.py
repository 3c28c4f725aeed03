"""Counts forwards whose graph was freed without a backward, which shows that one rank has skipped a step.

A rank whose loss raises in backward above the outputs of the module, and goes on, has sent nothing to the others. They
wait, and average its next gradients with theirs of the step before. The same numbers of forwards and backwards can be
quite right (an evaluation with gradients enabled), so this is no error; but numbers that differ between the ranks are
worth a warning on all of them.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ppe_ddp.torch_internals import is_in_backward, uncompiled_hook

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

logger = logging.getLogger("ppe_ddp")

_STATUS_BITS = 2
_MODULUS = 1 << (8 - _STATUS_BITS)


class ForwardCounter:
    """Counts the forwards of one module on this rank whose graph was freed before any backward reached it."""

    def __init__(self) -> None:
        self._dropped = 0
        self._recent = 0
        self._count = 0
        self._excused = 0

    def watch(self, outputs: Iterable[Tensor], on_backward: Callable[[], None], *, counts: bool) -> None:
        """Call ``on_backward`` when a backward reaches any of ``outputs``, those of one forward.

        Args:
            outputs: Those that are not differentiable are passed over.
            on_backward: Called with every gradient of them.
            counts: Whether the forward counts as dropped if none does.
        """
        hook = None
        for output in outputs:
            if output.grad_fn is not None:
                if hook is None:
                    self._count += 1
                    # A checkpoint that computes a forward once more, in backward, uses nothing of its outputs.
                    is_repeated = not counts or is_in_backward()
                    hook = _OutputHook(self, self._count, on_backward, is_reached=is_repeated)
                output.register_hook(hook)

    def count_dropped(self, *, excuses: bool) -> int:
        """The number of forwards so far that no backward has reached, nor can reach; called by each synchronization.

        Args:
            excuses: Whether the synchronization has no backward (``finish_grad_sync()``): then the forwards before it
                do not count.
        """
        if excuses:
            self._excused = self._count
        else:
            self._dropped += self._recent
        self._recent = 0
        return self._dropped

    def _drop(self, number: int) -> None:
        if number > self._excused:
            self._recent += 1


class _OutputHook:
    """A hook on the outputs of one forward; lives as long as their graph, or they themselves."""

    __slots__ = ("_forwards", "_is_reached", "_number", "_on_backward")

    def __init__(
        self, forwards: ForwardCounter, number: int, on_backward: Callable[[], None], *, is_reached: bool
    ) -> None:
        self._forwards = forwards
        self._number = number
        self._on_backward = on_backward
        self._is_reached = is_reached

    @uncompiled_hook
    def __call__(self, _gradient: Tensor) -> None:
        """Called by autograd: a backward has reached an output."""
        self._is_reached = True
        self._on_backward()

    def __del__(self) -> None:
        if not getattr(self, "_is_reached", True):  # an interrupt may have kept it from being made
            self._forwards._drop(self._number)


class DroppedForwards:
    """Compares how many forwards each rank has dropped, at each synchronization, and warns where they differ.

    Args:
        rank: This one, for the message.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._has_differed = False
        self._has_warned = False

    def unpack(self, extra: bytes) -> bytes:
        """Unpack the bytes of :func:`pack_status`, one a rank, and warn once where the counts stay different.

        Returns:
            The statuses.
        """
        if not extra or max(extra) < 1 << _STATUS_BITS:
            self._has_differed = False
            return extra
        counts = [byte >> _STATUS_BITS for byte in extra]
        differ = min(counts) != max(counts)
        # Once is not enough: a graph in a reference cycle goes when the garbage is collected, on each rank in its time.
        if differ and self._has_differed and not self._has_warned:
            self._has_warned = True
            logger.warning(_warning(self._rank, counts))
        self._has_differed = differ
        return bytes(byte % (1 << _STATUS_BITS) for byte in extra)


def pack_status(status: int, dropped: int) -> int:
    """Pack a rank's status (below 4) and its number of dropped forwards (modulo 64) into one byte."""
    return status | (dropped % _MODULUS) << _STATUS_BITS


def _warning(rank: int, counts: Sequence[int]) -> str:
    by_rank = ", ".join(f"rank {other}: {count}" for other, count in enumerate(counts))
    return (
        f"rank {rank}: the ranks may be averaging gradients of different steps: they differ in how many forwards in "
        f"training mode have had no backward ({by_rank}). A rank that skips its backward, or goes on after its loss "
        "raised above the outputs of the module, must call ddp.finish_grad_sync() in that step. If these ranks only "
        "ran more forwards than the others, nothing is wrong: run those under torch.no_grad() or after eval()"
    )
