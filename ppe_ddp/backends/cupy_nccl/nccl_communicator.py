"""NCCL communicators of one group: made when they are first needed, through the group's store.

Also the border to CuPy: what NCCL reports becomes this library's errors here.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from ppe_ddp.errors import CommunicationError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Communicator", "Communicators", "Members", "NcclLibrary"]

_BYTES, _NUMBERS = b"b", b"n"


@dataclass(frozen=True, order=True)
class Members:
    """The ranks that a communicator connects.

    Attributes:
        purpose: "collectives" or "messages": the same ranks may have one for each.
        ranks: Ranks of the group, in the communicator's order; for messages the sender and the receiver.
    """

    purpose: str
    ranks: tuple[int, ...]

    @property
    def reversed(self) -> Members:
        """The same ranks in the reverse order."""
        return Members(self.purpose, self.ranks[::-1])


class Communicator(Protocol):
    """``cupy.cuda.nccl.NcclCommunicator``; buffers and streams are addresses, datatypes and ops are NCCL's numbers."""

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None: ...  # noqa: D102
    def reduce(  # noqa: D102
        self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, root: int, stream: int
    ) -> None: ...
    def broadcast(self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int) -> None: ...  # noqa: D102
    def reduceScatter(  # noqa: D102
        self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int
    ) -> None: ...
    def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None: ...  # noqa: D102
    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None: ...  # noqa: D102
    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None: ...  # noqa: D102
    def check_async_error(self) -> None: ...  # noqa: D102
    def abort(self) -> None: ...  # noqa: D102
    def destroy(self) -> None: ...  # noqa: D102


class NcclLibrary(Protocol):
    """``cupy.cuda.nccl``, or what stands in for it in tests."""

    @property
    def NcclError(self) -> type[Exception]: ...  # noqa: D102
    @property
    def NcclCommunicator(self) -> Any: ...  # noqa: D102

    def get_version(self) -> int: ...  # noqa: D102
    def get_unique_id(self) -> Any: ...  # noqa: D102
    def groupStart(self) -> None: ...  # noqa: D102
    def groupEnd(self) -> None: ...  # noqa: D102


class Communicators:
    """The communicators of one process group on this rank.

    Args:
        library: CuPy's NCCL.
        store: What the ranks of the group, and no others, share.
        rank: This rank in the group.
        place: Who and where, for errors.
        timeout: How long a rank waits for the others to come, in seconds.
    """

    def __init__(self, library: NcclLibrary, store: Any, rank: int, place: str, timeout: float) -> None:
        self._library = library
        self._store = store
        self._rank = rank
        self._place = place
        self._timeout = timeout
        self._made: dict[tuple[int, Members], Communicator] = {}
        self._counts: dict[Members, int] = {}
        self._ended = False

    def __iter__(self) -> Iterator[Communicator]:
        return iter(list(self._made.values()))

    def has(self, index: int, members: Members) -> bool:
        """Whether :meth:`of` would return at once."""
        return (index, members) in self._made

    def of(self, index: int, members: Members) -> Communicator:
        """The communicator of these ranks on the device of that number, which must be current.

        The first call for a device makes it: all members must make it together, and not inside a group of calls.

        Raises:
            CommunicationError: A rank did not come within the timeout, NCCL could not connect them, or all
                communicators were ended, by the watchdog perhaps while this call was on its way.
        """
        made = self._made.get((index, members))
        if made is None:
            if self._ended:
                raise CommunicationError(f"{self._place}: the group's communicators were ended")
            made = self._made[index, members] = self._connect(members)
        return made

    @contextlib.contextmanager
    def grouped(self) -> Iterator[None]:
        """Let NCCL start the calls made inside as one: none of them waits for another."""
        self._library.groupStart()
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception):
                self._library.groupEnd()
            raise
        self._library.groupEnd()

    @contextlib.contextmanager
    def translated_errors(self, what: str) -> Iterator[None]:
        """Make an error of NCCL one of this library's."""
        try:
            yield
        # CuPy has no name for NCCL's newer errors, and fails with KeyError while it looks for one.
        except (self._library.NcclError, KeyError) as error:
            reason = f"error {error}" if isinstance(error, KeyError) else str(error)
            raise CommunicationError(f"{self._place}: {what} over NCCL failed: {reason}") from error

    def end(self, *, orderly: bool) -> None:
        """Give all communicators back to NCCL, for good.

        Args:
            orderly: Whether all ranks do it and nothing is on its way; otherwise what is on its way is broken off.
        """
        self._ended = True
        for communicator in self:
            with contextlib.suppress(self._library.NcclError, KeyError):
                communicator.destroy() if orderly else communicator.abort()
        self._made.clear()

    def _connect(self, members: Members) -> Communicator:
        ranks = members.ranks
        # One rank's second device meets the others' second ones.
        turn = self._counts[members] = self._counts.get(members, 0) + 1
        key = f"cupy_nccl/{members.purpose}/{'-'.join(map(str, ranks))}/{turn}"
        with self.translated_errors(f"connecting ranks {list(ranks)}"):
            if self._rank == ranks[0]:
                self._store.set(f"{key}/id", _packed(self._library.get_unique_id()))
            # NCCL has no timeout for ranks that never come.
            self._store.set(f"{key}/here/{self._rank}", b"1")
            self._wait_for_ranks(key, ranks)
            unique_id = _unpacked(self._store.get(f"{key}/id"))
            communicator: Communicator = self._library.NcclCommunicator(len(ranks), unique_id, ranks.index(self._rank))
        return communicator

    def _wait_for_ranks(self, key: str, ranks: tuple[int, ...]) -> None:
        signs = {rank: f"{key}/here/{rank}" for rank in ranks}
        try:
            self._store.wait(list(signs.values()), timedelta(seconds=self._timeout))
        except RuntimeError as error:
            missing = [rank for rank, sign in signs.items() if not self._store.check([sign])]
            raise CommunicationError(
                f"{self._place}: ranks {missing} did not come within {self._timeout:g} s to connect ranks "
                f"{list(ranks)} over NCCL: they did not make the same call, or died"
            ) from error


def _packed(unique_id: Any) -> bytes:
    """An id as bytes: CuPy has had it as a tuple of signed numbers until version 14, as bytes from then on."""
    if isinstance(unique_id, bytes):
        return _BYTES + unique_id
    return _NUMBERS + bytes(number & 0xFF for number in unique_id)


def _unpacked(packed: bytes) -> Any:
    kind, content = packed[:1], packed[1:]
    if kind == _BYTES:
        return content
    return tuple(byte - 256 if byte > 127 else byte for byte in content)
