"""Weighted means of gradients: by samples or tokens, or over the ranks that have a gradient.

    weigh(loss, tokens)        multiplies the loss by its tokens
    backward begins            each wrapper that it reaches counts the tokens of the losses behind it
    mask                       carries the tokens of each rank
    first bucket is packed     gradients are multiplied by ranks / tokens of all ranks, and then averaged

So the mean over the ranks is the gradient of the mean loss of all tokens, without a further message. Counts of
backwards in ``no_sync()`` add up until the gradients are synchronized.

    vote                       carries, for each parameter with ``average_where_used``, which ranks have used it
    averages are handed over   they are multiplied by the count of all ranks / the count of these ranks
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import compress
from threading import get_ident
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch import distributed as dist

from ppe_ddp.errors import DisagreementError, UnusableError
from ppe_ddp.torch_internals import (
    EXISTS,
    GRADIENT,
    accumulates_below,
    at_end_of_backward,
    fits,
    graph_task,
    is_captured,
    node_is_executed,
    uncompiled_hook,
    version_of,
)

_NOTHING, _UNWEIGHTED = 0, 2**32 - 1
"""The words of a rank without gradients, and of a rank whose gradients have no weight. A weight is 1 + the bits of its
float32, which lies between them."""
UNWEIGHTED_BYTES = b"\x00\xff"
SAID = tuple(struct.pack(">I", word) for word in (_NOTHING, _UNWEIGHTED))
"""The field of a rank that has not weighed: without gradients, and with some."""
WEIGHS_NOTHING = struct.pack(">I", 1)
"""The field of a rank whose counts are all 0."""
NBYTES = 4
"""The size of a rank's field."""
_SMALLEST, _LARGEST = 1e-30, 1e30  # so that sums are in the range of float32
_Versions = list[tuple[int, int]] | None


def weigh(loss: Tensor, count: float | Tensor) -> Tensor:
    """Give a mean loss the number of its samples or tokens, so that gradients are averaged over all of them.

    Call ``weigh(loss, tokens).backward()`` in place of ``loss.backward()``. After synchronization ``.grad`` is then the
    gradient of the mean over the tokens of all ranks, and of all backwards under ``no_sync()`` since the last
    synchronization; each may have another number of tokens. It works without a launcher, too, on one rank with a
    wrapper, after ``init_process_group()``.

    A rank whose counts are all 0 contributes nothing, even if its loss is NaN, and gets the averages. A rank without a
    backward calls ``finish_grad_sync()``. All losses of one backward share one denominator, the sum of their counts.

    Args:
        loss: A floating-point tensor of any shape: a mean over ``count`` samples or tokens.
        count: Finite and not negative; a number, or a tensor of one element, for which the host waits. It is rounded to
            the loss's dtype. The sum of a rank's counts is sent as float32: integers up to 16,777,216 are exact.

    Returns:
        The loss times the count. Call ``backward()`` on it, but print the given loss.

    Raises:
        ValueError: The count is negative, infinite, NaN, or too large or small for float32 or for the loss's dtype.
        UnusableError: The loss has a weight already. Or, in the backward: ``.grad`` holds averages already, or
            gradients of losses without a weight; the backward comes to no wrapper, or is that of
            ``torch.autograd.grad``; gradients that were all zero have been changed in place, on a CPU (on a GPU, where
            the host would wait, and as DTensors they count as cleared).
        DisagreementError: In the backward, on every rank: some ranks have gradients of losses without a weight.
    """
    number, limits = float(count), torch.finfo(loss.dtype)
    least, most = max(_SMALLEST, limits.tiny), min(_LARGEST, limits.max)
    if number and not least <= number <= most:
        raise ValueError(
            f"weigh() needs a finite count that is not negative, 0 or from {least:g} to {most:g} for a loss of "
            f"{loss.dtype}, not {number}: divide the counts of all ranks by the same number"
        )
    if loss.grad_fn in _Weigh.alive:
        raise UnusableError(_TWICE)
    Weights.were_used = True
    weighed: Tensor = _Weigh.apply(loss, number)  # type: ignore[no-untyped-call]
    return weighed


_TWICE = "a loss has a weight already: call weigh(loss, count) once, on what has none"


class _Weigh(torch.autograd.Function):
    """The autograd node of a weighted loss; lives as long as its graph."""

    alive: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()

    @staticmethod
    def forward(ctx: Any, loss: Tensor, count: float) -> Tensor:
        ctx.count = float(torch.tensor(count, dtype=loss.dtype, device="cpu"))  # what gradients are multiplied by
        ctx.executions, ctx.end, ctx.thread, ctx.task, ctx.is_counted = 0, lambda: None, 0, -1, False
        _Weigh.alive.add(ctx)
        return loss * count  # not divided by a number of this rank's, as graphs that communicate mix gradients of ranks

    @staticmethod
    @uncompiled_hook
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        end = partial(_Weigh.note_end, ctx)
        at_end_of_backward(end)
        ctx.end, ctx.thread, ctx.task = weakref.ref(end), get_ident(), graph_task()  # gone, too, if the backward raises
        ctx.is_on_cpu = gradients[0].is_cpu
        Weights.look_all()  # now, as a shared parameter's gradient may arrive before backward reaches each wrapper
        ctx.executions += 1
        return gradients[0] * ctx.count, None

    @staticmethod
    @uncompiled_hook
    def note_end(ctx: Any) -> None:
        """Note that a backward is over, and hold it to have come to a wrapper."""
        ctx.end = lambda: None
        if ctx.is_counted:
            return
        if not accumulates_below(ctx):
            if Weights.are_asked_for():
                raise UnusableError(
                    "torch.autograd.grad(weigh(loss, count), parameters) multiplies gradients by the count, and "
                    "nothing divides them: take it of the loss itself, or call backward() on weigh(loss, count)"
                )
            return
        if not (dist.is_available() and dist.is_initialized()):
            raise UnusableError(
                "weigh(loss, count) needs init_process_group() before the forward, with one rank too: nothing divides "
                "its gradients by the count"
            )
        raise UnusableError(
            "the backward of weigh(loss, count) has come to no wrapper, and nothing divides its gradients by the "
            "count: call weigh() outside of checkpoints with use_reentrant=True, pass gradients on by autograd (no "
            "detach()), and wrap the module where there is one rank, too"
        )


class Weights:
    """The counts of the gradients of one wrapper that are not synchronized yet.

    Args:
        has_nonzero: Tells whether any element of some gradients is not zero on this rank.

    Attributes:
        total: The sum of the counts.
        is_weighed: Whether there are counts.
        is_nothing: Whether there are counts, and all are 0.
        synchronized: The sum of all ranks' counts in the last synchronization.
    """

    _all: ClassVar[weakref.WeakSet[Weights]] = weakref.WeakSet()
    were_used: ClassVar[bool] = False
    """Whether any loss of this process had a weight so far."""

    def __init__(self, has_nonzero: Callable[[Sequence[Any]], bool]) -> None:
        self._all.add(self)
        self._before: tuple[int, bool, _Versions] = (-1, False, None)  # the graph task, and the gradients before it
        self.parameters: Sequence[Any] = ()  # of the wrapper
        self._has_nonzero = has_nonzero
        self._is_executed = node_is_executed()
        self._counted: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._left: _Versions = []  # None if no comparison is needed
        self._zeros: list[weakref.ref[Any]] = []  # the gradients, if all were zero on a CPU
        self._is_dropped = False  # a step has failed and left no gradient that the user could drop
        self._task = -1
        self._is_used = False
        self.total, self.is_weighed, self.is_nothing, self.synchronized = 0.0, False, False, 0.0
        self.is_refused = False  # each rank trains by itself, so a count has no meaning

    def note(self, arrived: int | None = None, *, is_synchronized: bool) -> None:
        """Count the losses of a backward that has reached the wrapper; only the gradient ``arrived`` has changed yet.

        If the backward ``is_synchronized``, :meth:`settle` is called at its end, or :meth:`remember` after a failure.
        """
        if not (_Weigh.alive or self.is_weighed) or self._task == (task := graph_task()):
            return
        self._task = task
        behind = self._behind()
        new = {node: execution for node, execution in behind.items() if self._counted.get(node, 0) < execution}
        if not new and (behind or not self.is_weighed):
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
                "too: clear them first (optimizer.zero_grad()); several losses of one step are one sum in one weigh(); "
                "checkpoints in one step around the wrapper have use_reentrant=False"
            )
        if not has_gradients and (self._is_dropped or self._left != versions):
            self._drop(versions)
        if not new:
            if self.is_weighed:
                raise UnusableError(
                    "a loss without a weight would add to gradients of weighed ones that are not synchronized yet: "
                    "call weigh() on all losses of a step, or clear the gradients first (zero_grad() of the wrapper)"
                )
            return
        self._left, self._is_dropped = None, False
        if not is_synchronized:
            at_end_of_backward(self.remember)
        self._counted.update(new)
        self.total, self.is_weighed = self.total + sum(node.count for node in new), True
        self.is_nothing = not self.total

    def _behind(self) -> dict[Any, int]:
        """The losses of the backward on this thread, each with the number of its execution there."""
        nodes = list(_Weigh.alive)
        behind = [node for node in nodes if self._is_executed(node)]
        task = graph_task()
        if behind and any(node.task == task and node.end() is not None for node in nodes if node not in behind):
            raise UnusableError(_TWICE)  # autograd counts the root of a backward as executed only if nothing is below
        if not behind:  # the root alone; in a reentrant checkpoint, those of the backward around it
            is_on_cpu, thread = all(one.device.type == "cpu" for one in self.parameters[:1]), get_ident()
            running = [node for node in nodes if node.end() is not None]
            behind = [node for node in running if node.task == task] or [
                node for node in running if node.thread == thread or not (is_on_cpu and node.is_on_cpu)
            ]
        for node in behind:
            node.is_counted = True
        return {node: node.executions + (node.end() is None) for node in behind}

    @classmethod
    def are_asked_for(cls) -> bool:
        """Whether the running ``autograd.grad`` is that of a parameter of some wrapper."""
        parameters = (one for weights in list(cls._all) for one in weights.parameters)
        return any(is_captured(one) for one in parameters if one.requires_grad)

    @classmethod
    def look_all(cls) -> None:
        """Note the existing gradients of each wrapper, as a backward begins."""
        task = graph_task()
        for weights in list(cls._all):
            if weights._before[0] != task:
                weights._look(task)

    def _look(self, task: int, but: int | None = None) -> None:
        gradients = self._gradients(but)
        versions = _versions(gradients) if self.is_weighed else None
        # For gradients that nobody has touched since they were counted, a GPU's host need not wait.
        arrived = None if but is None else id(self.parameters[but].grad)
        left = [] if self._is_dropped else [one for one in self._left or () if one[0] != arrived]
        has_gradients = bool(left and left == versions) or self._has_nonzero(gradients)
        self._before = task, has_gradients, None if has_gradients else versions

    @property
    def has_gradients(self) -> bool:
        """Whether there are gradients that are not zero, which the counts may be of."""
        return self._has_nonzero(self._gradients())

    def _gradients(self, but: int | None = None) -> list[Any]:
        parameters = self.parameters if but is None else [p for i, p in enumerate(self.parameters) if i != but]
        return list(filter(EXISTS, map(GRADIENT, parameters)))

    def remember(self, *, has_failed: bool = False) -> None:
        """Note the gradients in ``.grad`` at the end of a backward, which are not synchronized yet.

        If the step ``has_failed`` and left no gradients, it does not show whether the user drops it. Then another
        backward begins a new step, and ``finish_grad_sync()`` without a backward repeats this one. The same holds for
        other wrappers.
        """
        if has_failed:
            self._note_failure()
        if not self.is_weighed:
            return
        gradients = self._gradients()
        # If some gradient is not zero, zeros found later show that it was dropped, and versions are not needed. Not on
        # GPUs, for which the host would wait, nor of DTensors, whose other ranks may not have failed.
        is_here = not any(hasattr(one, "placements") or one.device.type != "cpu" for one in gradients)
        has_nonzero = is_here and self._has_nonzero(gradients)
        self._left = None if has_nonzero else _versions(gradients)
        self._zeros = [] if has_nonzero or not is_here else [*map(weakref.ref, gradients)]

    @classmethod
    def _note_failure(cls) -> None:
        for weights in list(cls._all):
            weights._is_dropped = weights.is_weighed and not weights._gradients()

    def give_up(self) -> None:
        """Give the step up: the counts stay only if there are gradients."""
        self._note_failure()
        if self._is_dropped:
            self.settle()

    def settle(self) -> None:
        """Drop the counts, as the gradients were synchronized or dropped.

        Another backward inside the one that is running counts its losses once more.
        """
        for node in [node for node in self._counted if node.end() is not None]:
            del self._counted[node]
        self.total, self.is_weighed, self.is_nothing, self._is_dropped = 0.0, False, False, False

    def _drop(self, versions: _Versions) -> None:
        """Drop the counts, as the user has dropped the gradients that were counted, by the ``versions`` of zeros."""
        is_same = [id(reference()) for reference in self._zeros] == [one for one, _ in versions or ()]
        if self.is_weighed and self._zeros and is_same and self._left != versions and not self._is_dropped:
            raise UnusableError(
                "gradients of weighed losses, which were all zero, have been changed in place before they were "
                "synchronized, and it does not show whether they were cleared: clear them by zero_grad() of the "
                "wrapper, or with set_to_none=True; clip or scale gradients after the synchronization"
            )
        self.settle()

    def are_zeros(self) -> bool:
        """Whether all gradients of a synchronization without a backward are zero; False if no rank has weighed."""
        return (self._is_used or self.were_used) and not self._has_nonzero(self._gradients())

    def field(self, *, silent: bool, has_gradients: bool, is_manual: bool) -> bytes:
        """This rank's field in a mask; ``is_manual`` for a synchronization without a backward."""
        if is_manual and not (has_gradients or silent):
            gradients = self._gradients()  # of NaN, where the counts are 0
            is_kept = self._has_nonzero(gradients) if self._left is None else self._left == _versions(gradients)
            if not is_kept:
                self._drop(_versions(gradients))
        if self.is_weighed and not silent:
            return struct.pack(">I", struct.unpack(">I", struct.pack(">f", self.total))[0] + 1)
        return SAID[has_gradients]

    def factor(self, field: bytes) -> float | None:
        """The factor of this rank's gradients before averaging, by the fields of all ranks; None if no rank weighs."""
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
        return len(words) / total if total and self.total else 1.0

    @property
    def factor_alone(self) -> float:
        """The factor of gradients in a group of one rank."""
        return 1.0 / self.total if self.total else 1.0


def _versions(gradients: Sequence[Any]) -> list[tuple[int, int]]:
    """The identity and version of each gradient, which show replacements and changes, even of zeros."""
    return [(id(gradient), version_of(gradient)) for gradient in gradients]


def _words(field: bytes) -> tuple[int, ...]:
    return struct.unpack(f">{len(field) // NBYTES}I", field)


def _count(word: int) -> float:
    return float(struct.unpack(">f", struct.pack(">I", word - 1))[0]) if word else 0.0


class WhereUsed:
    """Parameters whose gradients are averaged over the ranks that have them; bits of a vote tell these ranks."""

    def __init__(self, patterns: Literal[True] | Sequence[str], names: Sequence[str]) -> None:
        chosen = ["*"] if patterns is True else patterns
        self._indices = [i for i, name in enumerate(names) if any(fits(name, pattern) for pattern in chosen)]
        self._nbytes = -(-len(self._indices) // 8)

    def identities(self, parameters: Sequence[Any]) -> set[int]:
        """The identities of those of all ``parameters`` that are averaged so."""
        return {id(parameters[i]) for i in self._indices}

    def field(self, used: Collection[int]) -> bytes:
        """This rank's field in a vote; ``used`` has the parameters of which it has sent a gradient."""
        bits = "".join("01"[i in used] for i in self._indices)
        return int(f"0{bits}", 2).to_bytes(self._nbytes, "big")

    def factors(self, field: bytes, weights: bytes) -> dict[int, float]:
        """The factors of averages, by parameter index, without those that are 1; the fields have all ranks."""
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
