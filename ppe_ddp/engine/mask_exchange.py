"""Finds out which gradients exist on any rank: the maximum of each byte of one message over the ranks.

The same message shows whether the ranks have the same parameters and options, and are in the same step.

    digest (16)     complement of the digest (16)     fields     padding

Each field is written so that the maximum over the ranks tells all of them:

    field      bytes          mask, before the first bucket              vote, beside the last bucket
    present    a parameter    this rank has its gradient                 its gradient came late
    nodes      a parameter    on which node it exists, on several nodes  as in the mask (plan.py)
    statuses   a rank         whether it contributes                     what went wrong (grad_hooks.py)
    writers    a module       whether, and by which rank, its buffers were written (:func:`highest_digits` ...)
    apart      16             what is not ended together (completion.py)
    weights    4 a rank       how much its gradients stand for (weighing.py)
    users      bits a rank                                               the gradients it had, of some (weighing.py)
    times      2 a rank                                                  how long its step took (stragglers.py)
    parameters 24                                                        digest of some parameters (replicas.py)
    missing    1                                                         whether a gradient it announced has not come
    learned    32             digest of what this rank has learned: where one has another, all begin anew

A field that is added is given to ``Negotiation.start()``, and comes out of ``Negotiation.finish()``. Its length may
depend on the parameters, buffers and options, on which all ranks agree, and on nothing else: the message gets another
length only when all ranks know it, as a transport that is given different lengths may end the process (gloo does).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import distributed as dist

from ppe_ddp.backends.shm import ShmOptions
from ppe_ddp.engine.failures import is_explained
from ppe_ddp.engine.group_duplicates import is_over_gloo
from ppe_ddp.engine.memory import allocator
from ppe_ddp.engine.record import watch
from ppe_ddp.errors import CommunicationError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from ppe_ddp.engine.groups import Groups


DIGEST = 16
_COMPLEMENT = bytes(255 - value for value in range(256))
_BASE = 255  # digits of a rank: 255 - digit is sent, so that the maximum is the smallest digit, and 0 is none


def with_complement(digest: bytes) -> bytes:
    """``digest``, and each of its bytes from 255: the maxima are still complements if all ranks have sent the same.

    Else they are what no rank has sent.
    """
    return digest + digest.translate(_COMPLEMENT)


def is_same(field: bytes) -> bool:
    """Whether all ranks have sent the same digest in this field, written by :func:`with_complement`."""
    half = len(field) // 2
    return field[:half].translate(_COMPLEMENT) == field[half:]


def highest_digits(is_writer: Sequence[bool], rank: int) -> bytes:
    """The first of two fields that name the lowest rank (below 65,025) for which something is so, a byte a thing."""
    return bytes(_BASE - rank // _BASE if here else 0 for here in is_writer)


def lowest_digits(agreed: bytes, is_writer: Sequence[bool], rank: int) -> bytes:
    """The second field, once the maxima of the first are ``agreed``: only ranks with the smallest first digit write."""
    own = _BASE - rank // _BASE
    return bytes(
        _BASE - rank % _BASE if here and first == own else 0 for here, first in zip(is_writer, agreed, strict=True)
    )


def ranks_named(first: bytes, second: bytes, default: int) -> list[int]:
    """The lowest rank for each thing, by the maxima of both fields; ``default`` where it is so for none."""
    return [
        (_BASE - high) * _BASE + _BASE - low if high and low else default
        for high, low in zip(first, second, strict=True)
    ]


_CPU = torch.device("cpu")
_HEADER = 2 * DIGEST


class AgreedMask(NamedTuple):
    """The result of one exchange."""

    same: bool  # whether every rank sent the same digest
    fields: Mapping[str, bytes]  # the maximum over ranks of each byte of each field; empty where the digests differ


class MaskExchanger:
    """Sends the messages of :class:`MaskExchange` over the control group. All ranks must use it in the same order."""

    def __init__(self, groups: Groups) -> None:
        self.groups = groups
        self.capacity = 128  # bytes of the next message
        self._allocate = allocator(groups.control)
        # The backend shm does the same by itself. Few ranks share cores, on which each round of gloo's ring waits.
        is_direct = groups.world_size > 1 and is_over_gloo(groups.control)
        self._direct_bytes = ShmOptions().for_control().direct_up_to(groups.world_size) if is_direct else 0
        self.idle: list[Tensor] = []  # messages whose results were read

    def send(self, content: bytearray) -> tuple[Tensor, dist.Work | CommunicationError | None]:
        """Start to find the maximum over the ranks of each byte of a message with this content.

        It is an all-reduce in memory that the transport prefers, in place; over gloo alone, where it is small and ranks
        are few, each rank sends it to each.

        Gives the message, 1-D, or a row from each rank; and its Work, or why it could not be started; None where one
        rank is alone.
        """
        if 0 < len(content) <= self._direct_bytes:
            sent = torch.frombuffer(content * self.groups.world_size, dtype=torch.uint8)
            rows = torch.empty_like(sent)
            direct: dist.Work = dist.all_to_all_single(rows, sent, group=self.groups.control, async_op=True)
            return rows.view(self.groups.world_size, -1), direct
        while self.idle:
            message = self.idle.pop()
            if message.numel() == len(content):
                break
        else:
            message = self._allocate(len(content), torch.uint8, _CPU)
        message.copy_(torch.frombuffer(content, dtype=torch.uint8))
        if self.groups.world_size == 1:
            return message, None
        try:
            work: dist.Work = dist.all_reduce(message, dist.ReduceOp.MAX, self.groups.control, async_op=True)
        except CommunicationError as error:  # a transport that knows already that another rank has failed
            return message, error.with_traceback(None)  # whose frames would keep the backward
        return message, work


class MaskExchange:
    """One mask exchange, in flight; nothing waits until its :meth:`result` is asked for.

    ``digest``, sixteen bytes, must be the same on every rank; ``fields`` are as many, in the same order and as long, on
    every rank that has this digest.
    """

    def __init__(self, exchanger: MaskExchanger, digest: bytes, fields: Mapping[str, bytes]) -> None:
        self._exchanger = exchanger
        self.fields = fields
        self._header = with_complement(digest)
        self._body = b"".join(fields.values())
        self._fits = _HEADER + len(self._body) <= exchanger.capacity
        self._is_body = False  # whether the message in flight is the body by itself
        message = bytearray(exchanger.capacity)
        message[:_HEADER] = self._header
        if self._fits:
            message[_HEADER : _HEADER + len(self._body)] = self._body
        self._message, self._work = exchanger.send(message)
        self.nbytes = len(message)  # of the messages that were sent

    def done(self) -> bool:
        """Whether the result has arrived; sends the body that did not fit, once the digests are known to agree."""
        try:
            return not self._is_under_way() and (self._fits or not (self._send_body() and self._is_under_way()))
        except RuntimeError:
            return True  # result() says what is wrong

    def watch(self, arrived: Callable[[], None]) -> None:
        """Have ``arrived`` called when the message has arrived, if its transport can tell."""
        if self._work is not None:
            watch(self._work, arrived)

    def _is_under_way(self) -> bool:
        return isinstance(self._work, dist.Work) and not self._work.is_completed()

    def result(self) -> AgreedMask:
        """Wait for the result.

        Raises:
            CommunicationError: The all-reduce failed; names the ranks that are missing.
        """
        groups = self._exchanger.groups
        try:
            self._await_message()
            if not self._fits and self._send_body():
                self._await_message()
        except RuntimeError as error:
            if is_explained(error):
                raise
            raise groups.explained(error, "waiting for the other ranks to start a backward") from error
        self._work = None  # gloo's keeps the connection
        reply, start = self._reply(), 0
        if not self._is_body:
            if self._message.dim() == 1:
                self._exchanger.idle.append(self._message)
            if reply[:_HEADER] != self._header:
                return AgreedMask(False, {})
            start = _HEADER
        agreed = {}
        for name, field in self.fields.items():
            agreed[name] = reply[start : start + len(field)]
            start += len(field)
        return AgreedMask(True, agreed)

    def _reply(self) -> bytes:
        """The maxima, of a message that has arrived."""
        message = self._message
        return bytes((message if message.dim() == 1 else message.amax(0)).numpy().tobytes())

    def _await_message(self) -> None:
        if isinstance(self._work, CommunicationError):
            raise self._work
        if self._work is not None:
            self._exchanger.groups.failures.wait(self._work, _CPU)

    def _send_body(self) -> bool:
        """Once the digests are known to agree: send a body that did not fit, by itself; False if there is none.

        All ranks have a body of this length then, and all of them send it next.
        """
        if self._is_body:
            return False
        self._await_message()  # if it has failed, what came of it is no digest
        if self._reply()[:_HEADER] != self._header:
            return False
        self._is_body = True
        self._message, self._work = self._exchanger.send(bytearray(self._body))
        size = len(self._body)
        self.nbytes += size
        # double, so that a module that grows a little every step does not pay for it every step
        self._exchanger.capacity = 2 * (_HEADER + size)
        return True
