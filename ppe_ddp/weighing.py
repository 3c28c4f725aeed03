"""Means that are not over all ranks alike: weighted by samples or tokens, or over those that have a gradient.

    weigh(loss, tokens)        multiplies the loss by tokens / unit; the unit is a constant of this process
    a backward begins          each wrapper that it reaches counts the tokens of the losses behind it
    mask                       carries the tokens of each rank
    first bucket is packed     gradients are multiplied by unit * ranks / tokens of all ranks, and then averaged

So the mean over the ranks is the gradient of the mean loss of all tokens, with no message more. Counts of backwards in
``no_sync()`` add up until the gradients are synchronized.

    vote                       carries, for each parameter that is averaged where it is used, which ranks have used it
    averages are handed over   and multiplied by the count of all ranks / that of those
"""

from __future__ import annotations

import math
import struct
import weakref
from itertools import compress
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import torch

from ppe_ddp.errors import DisagreementError, UnusableError
from ppe_ddp.torch_internals import (
    EXISTS,
    GRADIENT,
    at_end_of_backward,
    fits,
    graph_task,
    node_is_executed,
    uncompiled_hook,
    version_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from torch import Tensor

_NOTHING, _UNWEIGHTED = 0, 2**32 - 1
"""What a rank says that has no gradients, and one whose gradients have no weight; between them 1 + float32."""
UNWEIGHTED_BYTES = b"\x00\xff"
SAID = tuple(struct.pack(">I", word) for word in (_NOTHING, _UNWEIGHTED))
"""What a rank says without gradients, and with some, where it has not weighed."""
NBYTES = 4
"""Of what a rank says."""
_Versions = list[tuple[int, int]] | None


def weigh(loss: Tensor, count: float | Tensor) -> Tensor:
    """Say how many samples or tokens a mean loss stands for, so that gradients are averaged over all of those.

    ``weigh(loss, tokens).backward()`` in place of ``loss.backward()`` makes ``.grad``, once it is synchronized, the
    gradient of the mean over the tokens of all ranks, and of all backwards under ``no_sync()`` since the last
    synchronization, however many tokens each had. It is the same without a launcher, on one rank that has a wrapper.

    A rank all whose counts are 0 contributes nothing, whatever its loss is, and gets the averages. One that has no
    backward calls ``finish_grad_sync()``. All losses of one backward share one denominator, the sum of their counts.

    Args:
        loss: Of any shape, floating-point: a mean over ``count``.
        count: Finite and not negative; a number, or a tensor of one element, for which the host waits. The sum of a
            rank's counts is sent as float32: integers up to 16,777,216 are exact.

    Returns:
        The loss times a constant of this process; call ``backward()`` on it, and print the loss that was given.

    Raises:
        ValueError: The count is negative, infinite or NaN.
        UnusableError: In the backward: ``.grad`` holds averages already, or gradients of losses without a weight.
        DisagreementError: In the backward, on every rank: some ranks have gradients of losses without a weight.
    """
    number = float(count)
    if not 0 <= number < math.inf:
        raise ValueError(f"weigh() needs a finite count that is not negative, not {number}")
    Weights.were_used = True
    weighed: Tensor = _Weigh.apply(loss, number)  # type: ignore[no-untyped-call]
    return weighed


class _Weigh(torch.autograd.Function):
    """The node of a loss that has a weight; lives as long as its graph."""

    alive: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()
    unit: ClassVar[float] = 0.0

    @staticmethod
    def forward(ctx: Any, loss: Tensor, count: float) -> Tensor:
        if count and not _Weigh.unit:
            _Weigh.unit = 2.0 ** round(math.log2(count))  # products stay about as large as the loss, and are exact
        ctx.count, ctx.executions, ctx.end = count, 0, lambda: None
        ctx.factor = count / (_Weigh.unit or 1.0)
        _Weigh.alive.add(ctx)
        return loss * float(ctx.factor)

    @staticmethod
    @uncompiled_hook
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        def end() -> None: ...

        at_end_of_backward(end)
        ctx.end = weakref.ref(end)  # which lives as long as the graph task
        Weights.look_all()  # no gradient has arrived yet: tied parameters may, before a backward comes to each wrapper
        ctx.executions += 1
        return gradients[0] * ctx.factor, None


class _Parameter(Protocol):
    @property
    def grad(self) -> Tensor | None: ...


class Weights:
    """How much the gradients of one wrapper stand for that were not synchronized yet.

    Args:
        has_nonzero: Tells whether this rank has anything but zeros of some gradients.

    Attributes:
        total: The sum of the counts.
        is_weighed: Whether there are any.
        is_nothing: Whether there are, and all are 0.
        synchronized: The sum of all ranks' counts in the last synchronization.
    """

    _all: ClassVar[weakref.WeakSet[Weights]] = weakref.WeakSet()
    were_used: ClassVar[bool] = False
    """Whether any loss of this process had a weight so far."""

    def __init__(self, has_nonzero: Callable[[Sequence[Any]], bool]) -> None:
        self._all.add(self)
        self._before: tuple[int, bool, _Versions] = (-1, False, None)  # the graph task, and what it found
        self.parameters: Sequence[_Parameter] = ()  # of the wrapper
        self._has_nonzero = has_nonzero
        self._is_executed = node_is_executed()
        self._counted: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._left: _Versions = []  # None where no comparison is needed
        self._is_dropped = False  # whether a step has failed, and left no gradient that could be dropped
        self._task = -1
        self._is_used = False
        self.total, self.is_weighed, self.is_nothing, self.synchronized = 0.0, False, False, 0.0
        self.is_refused = False  # whether each rank trains by itself, where a count has no meaning

    def note(self, arrived: int | None = None, *, is_synchronized: bool) -> None:
        """A backward has come to the wrapper, whose gradients but that of ``arrived`` have not changed yet.

        If it ``is_synchronized``, at its end :meth:`settle` is called, or :meth:`remember` where that has failed.
        """
        if not _Weigh.alive or self._task == (task := graph_task()):
            return
        self._task = task
        behind = {}
        for node in list(_Weigh.alive):
            is_over = node.end() is None  # its execution, if there was one, belongs to an older backward
            execution = node.executions + is_over
            if self._counted.get(node, 0) < execution and not (is_over and not self._is_executed(node)):
                behind[node] = execution
        if not behind:
            return
        if self.is_refused:
            raise UnusableError(
                "weigh() averages over the samples of all ranks, and LocalSGD or DiLoCo lets each rank train by "
                "itself: call backward() on the loss itself"
            )
        if self._before[0] != task:
            self._look(task, but=arrived)
        _, has_gradients, versions = self._before
        if has_gradients and not self.is_weighed:
            raise UnusableError(
                "weigh() begins with gradients that are averages, or of losses without a weight, and would weigh them, "
                "too: clear them first (optimizer.zero_grad()); several losses of one step are one sum in one weigh()"
            )
        if not has_gradients and (self._is_dropped or self._left != versions):
            self.settle()  # the user has dropped what was weighed before
        self._left, self._is_dropped = None, False
        if not is_synchronized:
            at_end_of_backward(self.remember)
        self._counted.update(behind)
        self.total, self.is_weighed = self.total + sum(node.count for node in behind), True
        self.is_nothing = not self.total

    @classmethod
    def look_all(cls) -> None:
        """A backward begins: note which gradients there are, in each wrapper."""
        task = graph_task()
        for weights in list(cls._all):
            if weights._before[0] != task:
                weights._look(task)

    def _look(self, task: int, but: int | None = None) -> None:
        gradients = self._gradients(but)
        has_gradients = self._has_nonzero(gradients)
        self._before = task, has_gradients, None if has_gradients or not self.is_weighed else _versions(gradients)

    def _gradients(self, but: int | None = None) -> list[Any]:
        parameters = self.parameters if but is None else [p for i, p in enumerate(self.parameters) if i != but]
        return list(filter(EXISTS, map(GRADIENT, parameters)))

    def remember(self, *, has_failed: bool = False) -> None:
        """The backward is over, and its gradients, which are in ``.grad``, are not synchronized yet.

        Where that ``has_failed``, and there are none, nobody sees whether the user drops the step: another backward
        begins a new one, and ``finish_grad_sync()`` without a backward takes this one again. So do other wrappers.
        """
        if has_failed:
            self._note_failure()
        if not self.is_weighed:
            return
        gradients = self._gradients()
        # If one is not zero, who finds nothing but zeros later need not compare. A GPU would be waited for.
        is_on_cpu = bool(gradients) and gradients[0].device.type == "cpu"
        self._left = None if is_on_cpu and self._has_nonzero(gradients) else _versions(gradients)

    @classmethod
    def _note_failure(cls) -> None:
        for weights in list(cls._all):
            weights._is_dropped = weights.is_weighed and not weights._gradients()

    def give_up(self) -> None:
        """The step is given up: what was weighed counts for the gradients there are, if any."""
        self._note_failure()
        if self._is_dropped:
            self.settle()

    def settle(self) -> None:
        """The gradients were synchronized, or are gone."""
        self.total, self.is_weighed, self.is_nothing, self._is_dropped = 0.0, False, False, False

    def are_zeros(self) -> bool:
        """Whether gradients that no backward brings are just zeros; asked of them only if some rank has weighed."""
        return (self._is_used or bool(_Weigh.unit)) and not self._has_nonzero(self._gradients())

    def field(self, *, silent: bool, has_gradients: bool, is_manual: bool) -> bytes:
        """What this rank says in a mask; ``is_manual`` where no backward has come to :meth:`note` for it."""
        if is_manual and not has_gradients and self._left != _versions(self._gradients()):
            self.settle()  # the user has dropped what was weighed before
        if self.is_weighed and not silent:
            return struct.pack(">I", struct.unpack(">I", struct.pack(">f", self.total))[0] + 1)
        return SAID[has_gradients]

    def factor(self, field: bytes) -> float | None:
        """What gradients here are multiplied by before the average, by what all have said; None where nobody weighs."""
        if not field.strip(UNWEIGHTED_BYTES):
            return None
        self._is_used = True
        words = _words(field)
        missing = ", ".join(str(rank) for rank, word in enumerate(words) if word == _UNWEIGHTED)
        if missing:
            weighing = ", ".join(str(rank) for rank, word in enumerate(words) if 0 < word < _UNWEIGHTED)
            raise DisagreementError(
                f"rank {weighing} weighs its loss, and rank {missing} has gradients of one without a weight: call "
                "ppe_ddp.weigh(loss, count) on all ranks, or on none"
            )
        self.synchronized = total = sum(map(_count, words))
        return _Weigh.unit * len(words) / total if total and self.total else 1.0

    @property
    def factor_alone(self) -> float:
        """The same for one rank alone, which sends nothing."""
        return _Weigh.unit / self.total if self.total else 1.0


def _versions(gradients: Sequence[Any]) -> list[tuple[int, int]]:
    """Which tensors these are, and how often each was changed: gradients may well be zero."""
    return [(id(gradient), version_of(gradient)) for gradient in gradients]


def _words(field: bytes) -> tuple[int, ...]:
    return struct.unpack(f">{len(field) // NBYTES}I", field)


def _count(word: int) -> float:
    return float(struct.unpack(">f", struct.pack(">I", word - 1))[0]) if word else 0.0


class WhereUsed:
    """Parameters whose gradients are averaged over the ranks that have them; tells these ranks by bits of a vote."""

    def __init__(self, patterns: Literal[True] | Sequence[str], names: Sequence[str]) -> None:
        chosen = ["*"] if patterns is True else patterns
        self._indices = [i for i, name in enumerate(names) if any(fits(name, pattern) for pattern in chosen)]
        self._nbytes = -(-len(self._indices) // 8)

    def field(self, used: Collection[int]) -> bytes:
        """What this rank says in a vote, which has ``used`` these parameters: it has sent a gradient of each."""
        bits = "".join("01"[i in used] for i in self._indices)
        return int(f"0{bits}", 2).to_bytes(self._nbytes, "big")

    def factors(self, field: bytes, weights: bytes) -> dict[int, float]:
        """What averages are multiplied by, by parameter index, where not 1; the fields are those of all ranks."""
        starts = range(0, len(field), self._nbytes or 1)
        is_weighed = bool(weights.strip(UNWEIGHTED_BYTES))
        counts = [*map(_count, _words(weights))] if is_weighed else [1.0] * len(starts)
        rows = [int.from_bytes(field[start : start + self._nbytes], "big") for start in starts]
        bits = [f"{row:0{len(self._indices)}b}".encode().translate(_VALUES) for row in rows]
        total, found = sum(counts), {}
        for i, column in zip(self._indices, zip(*bits, strict=True), strict=False):
            if 0 < (own := sum(compress(counts, column))) < total:
                found[i] = total / own
        return found


_VALUES = bytes(int(value == ord("1")) for value in range(256))
