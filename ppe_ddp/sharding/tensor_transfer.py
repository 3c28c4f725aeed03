"""Sends and receives the messages of a load: from rank 0's checkpoint into each rank's memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from ppe_ddp.errors import CommunicationError
from ppe_ddp.sharding.regions import cut
from ppe_ddp.sharding.transfer_plan import tree

if TYPE_CHECKING:
    from torch import Tensor

    from ppe_ddp.sharding.load_group import LoadGroup
    from ppe_ddp.sharding.transfer_plan import Piece, TransferMessage

_NOTHING = torch.empty(0, dtype=torch.uint8)
_IN_FLIGHT = 16  # enough to keep every receiver busy; each costs a request, not memory


@dataclass(eq=False)
class RegionMemory:
    """This rank's memory for its region of one tensor.

    Attributes:
        target: Of the region's shape, on any device and of any dtype: values are converted as they come.
        filled: Whether the values are there already, because the memory is the checkpoint's own.
    """

    target: Tensor
    filled: bool = False

    def window(self, piece: Piece, device: torch.device) -> Tensor | None:
        """The bytes of ``piece`` in the target, where they can be received straight into it."""
        target = self.target
        if target.device != device or target.dtype is not piece.routed.dtype or not target.is_contiguous():
            return None
        return target.view(-1)[piece.offset : piece.offset + piece.numel].view(torch.uint8)

    def put(self, piece: Piece, values: Tensor) -> None:
        """Copy the flat ``values`` of a piece to their place."""
        if self.filled:
            return
        place = self.target
        if place.is_contiguous():
            place.view(-1)[piece.offset : piece.offset + piece.numel].copy_(values)
            return
        for dim, (start, stop) in enumerate(piece.box):
            place = place.narrow(dim, start, stop - start)
        place.copy_(values.view(place.shape))


@dataclass(eq=False)
class _PendingMessage:
    """A message in flight."""

    message: TransferMessage
    buffer: Tensor
    staged: int
    receives: list[Any]
    onward: list[int]
    sends: list[Any] = field(default_factory=list)


class TensorTransfer:
    """Sends and receives the planned messages. All ranks of the load group run one, with the same plan.

    Nothing here raises for what goes wrong with a tensor on one rank, since the others count on its messages: look
    at ``failure`` when all has been sent.

    Args:
        load_group: The ranks.
        read: Gives a full tensor of the checkpoint; called on rank 0 only.
        memories: This rank's memory, by the key of the checkpoint.
        device: Whose tensors are sent.
        staging_nbytes: How much memory may be used for messages that cannot be received or sent in place.

    Attributes:
        failure: The first error of reading or writing tensors here.
    """

    def __init__(
        self,
        load_group: LoadGroup,
        read: Callable[[str], Tensor],
        memories: dict[str, RegionMemory],
        device: torch.device,
        *,
        staging_nbytes: int,
    ) -> None:
        self._load_group = load_group
        self._read = read
        self._memories = memories
        self._device = device
        self._room = staging_nbytes
        self._staged = 0
        self._pending: deque[_PendingMessage] = deque()
        self._last_route: tuple[int, ...] | None = None
        self.failure: Exception | None = None

    def run(self, messages: Iterable[TransferMessage], tell: Callable[[int], None]) -> None:
        """Send and receive ``messages``; ``tell`` gets the bytes of each as it is sent.

        Raises:
            CommunicationError: The process group failed.
        """
        try:
            for message in messages:
                self._make_room(message)
                self._start(message)
                tell(message.nbytes)
            while self._pending:
                self._finish()
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {self._load_group.rank} of {self._load_group.size}: loading a checkpoint together failed: "
                f"{error}. An error or a crash on another rank ends here: look for the first traceback of all ranks."
            ) from error

    def _make_room(self, message: TransferMessage) -> None:
        while self._pending and (len(self._pending) >= _IN_FLIGHT or self._staged + message.nbytes > self._room):
            self._finish()
        everyone = len(message.route) == self._load_group.size
        if self._device.type != "cpu" and self._last_route is not None:
            # NCCL may not have a broadcast and a message between two ranks in flight at a time.
            while self._pending and everyone != (len(self._last_route) == self._load_group.size):
                self._finish()
        self._last_route = message.route

    def _start(self, message: TransferMessage) -> None:
        load_group = self._load_group
        buffer, staged = self._packed(message) if load_group.is_source else self._room_for(message)
        pending = _PendingMessage(message, buffer, staged, [], [])
        if len(message.route) == load_group.size > 1:
            work = dist.broadcast(buffer, load_group.ranks[0], group=load_group.group, async_op=True)
            pending.receives = [work]
        else:
            parent, pending.onward = tree(message.route, load_group.rank)
            if parent is None:
                self._send(pending)
            else:
                pending.receives = [dist.irecv(buffer, load_group.ranks[parent], group=load_group.group)]
        self._staged += staged
        self._pending.append(pending)

    def _send(self, pending: _PendingMessage) -> None:
        ranks = [self._load_group.ranks[child] for child in pending.onward]
        pending.sends = [dist.isend(pending.buffer, rank, group=self._load_group.group) for rank in ranks]

    def _finish(self) -> None:
        pending = self._pending.popleft()
        for work in pending.receives:
            work.wait()
        if not self._load_group.is_source:
            self._send(pending)
            self._try(self._unpack, pending)
        for work in pending.sends:
            work.wait()
        self._staged -= pending.staged

    def _packed(self, message: TransferMessage) -> tuple[Tensor, int]:
        """The bytes of a message on rank 0, and how much memory they took; what is for rank 0 itself is put there."""
        if message.route == (0,):
            for piece in message.pieces:
                self._try(self._keep, piece)
            return _NOTHING, 0
        packed: tuple[Tensor, int] | None = self._try(self._pack, message)
        # The others wait for so many bytes, even after an error, which they get at the end.
        return packed or (torch.empty(message.nbytes, dtype=torch.uint8, device=self._device), message.nbytes)

    def _pack(self, message: TransferMessage) -> tuple[Tensor, int]:
        parts = [self._cut(piece) for piece in message.pieces]
        if 0 in message.route:
            for piece, (values, _) in zip(message.pieces, parts, strict=True):
                self._memories[piece.routed.key].put(piece, values)
        flat = [values.view(torch.uint8) for values, _ in parts]
        if len(flat) > 1:
            return torch.cat(flat), message.nbytes
        return flat[0], message.nbytes if parts[0][1] else 0

    def _keep(self, piece: Piece) -> None:
        region_memory = self._memories[piece.routed.key]
        if not region_memory.filled:
            region_memory.put(piece, self._cut(piece)[0])

    def _cut(self, piece: Piece) -> tuple[Tensor, bool]:
        """The flat values of a piece, ready to be sent, and whether they are a copy."""
        source = self._read(piece.routed.key).detach()
        values = cut(source, piece.region, piece.box).to(self._device, piece.routed.dtype)
        values = values.resolve_conj().resolve_neg().contiguous().view(-1)
        return values, values.untyped_storage().data_ptr() != source.untyped_storage().data_ptr()

    def _room_for(self, message: TransferMessage) -> tuple[Tensor, int]:
        window = self._try(self._window, message)
        if window is not None:
            return window, 0
        return torch.empty(message.nbytes, dtype=torch.uint8, device=self._device), message.nbytes

    def _window(self, message: TransferMessage) -> Tensor | None:
        """Where a message can be received straight into the memory that it is for."""
        if len(message.pieces) > 1:
            return None
        piece = message.pieces[0]
        return self._memories[piece.routed.key].window(piece, self._device)

    def _unpack(self, pending: _PendingMessage) -> None:
        if not pending.staged:
            return
        start = 0
        for piece in pending.message.pieces:
            content = pending.buffer[start : start + piece.nbytes]
            if content.storage_offset() % piece.routed.dtype.itemsize:
                content = content.clone()
            self._memories[piece.routed.key].put(piece, content.view(piece.routed.dtype))
            start += piece.nbytes

    def _try(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except Exception as error:
            self.failure = self.failure or error
            return None
