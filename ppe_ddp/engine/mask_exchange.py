"""Finds out which gradients exist on any rank: the maximum of each byte of one message over the ranks.

The same message shows whether the ranks have the same parameters and options, and are in the same step.

    digest (16)     complement of the digest (16)     fields     padding

Each field is encoded so that every rank can decode it from the maxima over the ranks:

    field      bytes          mask, before the first bucket              vote, beside the last bucket
    present    a parameter    this rank has its gradient                 its gradient came late
    nodes      a parameter    the node that has it (plan.py)             as in the mask
    statuses   a rank         whether it contributes                     its errors (grad_hooks.py)
    writers    a module       the lowest rank that has written its buffers (:func:`highest_digits` ...)
    apart      32             the wrappers that end together (completion.py)
    weights    4 a rank       the weight of its gradients (weighing.py)
    users      bits a rank                                               which of some gradients it had (weighing.py)
    times      2 a rank                                                  the duration of its step (stragglers.py)
    parameters 24                                                        digest of some parameters (replicas.py)
    held       a parameter                                               without negotiation: it had this gradient ...
    lacking    a parameter                                               ... or had it not
    missing    1                                                         an announced gradient has not come
    learned    32             digest of what this rank has learned: if the digests differ, all ranks forget it
    taken      4 a rank       with a compressor: the steps that it has completed; all ranks take the largest number

To add a field, pass it to ``Negotiation.start()``; ``Negotiation.finish()`` returns it. Its length may depend only on
the parameters, buffers and options, which are the same on all ranks. So the message has one length on all ranks; if
lengths differ, a transport may end the process, as gloo does.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from ppe_ddp.backends.shm import ShmOptions
from ppe_ddp.engine.failures import is_explained
from ppe_ddp.engine.group_duplicates import is_over_gloo
from ppe_ddp.engine.groups import Groups
from ppe_ddp.engine.memory import allocator
from ppe_ddp.engine.record import watch
from ppe_ddp.errors import CommunicationError
from ppe_ddp.waiting import progress_engine

DIGEST = 16
_COMPLEMENT = bytes(255 - value for value in range(256))
_BASE = 255  # of the digits of a rank. A rank sends 255 - digit, so the maximum is the smallest digit; 0 is none


def with_complement(digest: bytes) -> bytes:
    """``digest``, followed by 255 minus each of its bytes.

    The maxima over the ranks are complements of each other only if all ranks have sent the same digest.
    """
    return digest + digest.translate(_COMPLEMENT)


def is_same(field: bytes) -> bool:
    """Whether all ranks have sent the same digest in this field, written by :func:`with_complement`."""
    half = len(field) // 2
    return field[:half].translate(_COMPLEMENT) == field[half:]


def highest_digits(is_writer: Sequence[bool], rank: int) -> bytes:
    """The first of two fields that name the lowest writer (a rank below 65,025) of each item, one byte an item."""
    return bytes(_BASE - rank // _BASE if here else 0 for here in is_writer)


def lowest_digits(agreed: bytes, is_writer: Sequence[bool], rank: int) -> bytes:
    """The second field, given the maxima ``agreed`` of the first: only ranks with the smallest first digit write.

    Of an item that none has named in the first field, a rank below 255 may still be the writer.
    """
    own = _BASE - rank // _BASE
    named = (own, 0) if own == _BASE else (own,)
    return bytes(
        _BASE - rank % _BASE if here and first in named else 0 for here, first in zip(is_writer, agreed, strict=True)
    )


def ranks_named(first: bytes, second: bytes, default: int) -> list[int]:
    """The lowest writer of each item, decoded from the maxima of both fields; ``default`` for an item without one."""
    return [
        (_BASE - (high or _BASE)) * _BASE + _BASE - low if low else default
        for high, low in zip(first, second, strict=True)
    ]


_CPU = torch.device("cpu")
_HEADER = 2 * DIGEST


class AgreedMask(NamedTuple):
    """The result of one exchange."""

    same: bool  # whether every rank sent the same digest
    fields: Mapping[str, bytes]  # the maximum over ranks of each byte of each field; empty if the digests differ


class MaskExchanger:
    """Sends the messages of :class:`MaskExchange` over the control group. All ranks must use it in the same order."""

    def __init__(self, groups: Groups) -> None:
        self.groups = groups
        self.capacity = 128  # bytes of the next message
        self._allocate = allocator(groups.control)
        # gloo's ring waits for a core in each round; for few ranks, one direct message to each rank is faster. The
        # backend shm does this by itself.
        is_direct = groups.world_size > 1 and is_over_gloo(groups.control)
        self._direct_bytes = ShmOptions().for_control().direct_up_to(groups.world_size) if is_direct else 0
        self.idle: list[Tensor] = []  # messages that can be reused

    def send(self, content: bytearray) -> tuple[Tensor, dist.Work | CommunicationError | None]:
        """Start to find the maximum over the ranks of each byte of a message with this content.

        It is an all-reduce in place, in memory that the transport prefers. Over gloo alone, a small message among few
        ranks is sent by each rank to each.

        Returns the message, either 1-D or with a row from each rank; and its Work, or the error that has kept it from
        starting, or None in a group of one rank.
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
        except CommunicationError as error:  # the transport already knows that another rank has failed
            return message, error.with_traceback(None)  # its frames would keep the backward alive
        return message, work


class MaskExchange:
    """One mask exchange in flight; only :meth:`result` waits.

    ``digest`` has 16 bytes, and is expected to be the same on every rank. Ranks with the same digest must pass the same
    ``fields``: names, order and lengths.
    """

    def __init__(self, exchanger: MaskExchanger, digest: bytes, fields: Mapping[str, bytes]) -> None:
        self._exchanger = exchanger
        self.fields = fields
        self._header = with_complement(digest)
        self._body = b"".join(fields.values())
        self._fits = _HEADER + len(self._body) <= exchanger.capacity
        self._is_body = False  # whether the message in flight is the body alone
        self._lock = threading.Lock()  # another thread that waits for its own wrapper calls done() as well
        message = bytearray(exchanger.capacity)
        message[:_HEADER] = self._header
        if self._fits:
            message[_HEADER : _HEADER + len(self._body)] = self._body
        self._message, self._work = exchanger.send(message)
        self.nbytes = len(message)  # of all messages sent

    def done(self) -> bool:
        """Whether the result has arrived; sends a body that did not fit as soon as the digests are known to agree."""
        if not self._lock.acquire(blocking=False):
            return False  # another thread sends the body, or is in result()
        try:
            return not self._is_under_way() and (self._fits or not (self._send_body() and self._is_under_way()))
        except RuntimeError:
            return True  # result() raises it
        finally:
            self._lock.release()

    def watch(self, arrived: Callable[[], None]) -> None:
        """Call ``arrived`` when the message has arrived, if its transport can tell."""
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
        if not self._lock.acquire(blocking=False):
            progress_engine(os.getpid()).wait_until(partial(self._lock.acquire, blocking=False))
        try:
            self._await_message()
            if not self._fits and self._send_body():
                self._await_message()
        except RuntimeError as error:
            if is_explained(error):
                raise
            raise groups.explained(error, "waiting for the other ranks to start a backward") from error
        finally:
            self._lock.release()
        self._work = None  # gloo's Work holds the connection
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
        """The maxima in a message that has arrived."""
        message = self._message
        return bytes((message if message.dim() == 1 else message.amax(0)).numpy().tobytes())

    def _await_message(self) -> None:
        if isinstance(self._work, CommunicationError):
            raise self._work
        if self._work is not None:
            self._exchanger.groups.failures.wait(self._work, _CPU)

    def _send_body(self) -> bool:
        """Send a body that did not fit, if the digests of all ranks agree; returns whether it was sent.

        If they agree, all ranks have a body of this length, and all of them send it next.
        """
        if self._is_body:
            return False
        self._await_message()  # raises if the message has failed: its content is no digest then
        if self._reply()[:_HEADER] != self._header:
            return False
        self._is_body = True
        self._message, self._work = self._exchanger.send(bytearray(self._body))
        size = len(self._body)
        self.nbytes += size
        # Double, so that a module that grows a little in every step does not send two messages in every step.
        self._exchanger.capacity = 2 * (_HEADER + size)
        return True
