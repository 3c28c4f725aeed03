"""Carries parcels: out of the checkpoint on rank 0, over the process group, into the memory of each rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from ppe_ddp.errors import CommunicationError
from ppe_ddp.sharding.plan import tree
from ppe_ddp.sharding.regions import cut

if TYPE_CHECKING:
    from torch import Tensor

    from ppe_ddp.sharding.plan import Parcel, Piece
    from ppe_ddp.sharding.team import Team

_NOTHING = torch.empty(0, dtype=torch.uint8)
_IN_FLIGHT = 16  # enough to keep every receiver busy; each costs a request, not memory


@dataclass(eq=False)
class Hold:
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
        if target.device != device or target.dtype is not piece.shipment.dtype or not target.is_contiguous():
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
class _Delivery:
    """A parcel on its way."""

    parcel: Parcel
    buffer: Tensor
    staged: int
    arrivals: list[Any]
    onward: list[int]
    departures: list[Any] = field(default_factory=list)


class Courier:
    """Carries parcels between the ranks of one team. All of them run one, with the same plan.

    Nothing here raises for what goes wrong with a tensor on one rank, since the others count on its messages: look
    at ``failure`` when all is carried.

    Args:
        team: The ranks.
        read: Gives a full tensor of the checkpoint; called on rank 0 only.
        holds: This rank's memory, by the key of the checkpoint.
        device: Whose tensors are sent.
        staging_nbytes: How much memory may be used for messages that cannot be received or sent in place.

    Attributes:
        failure: The first error of reading or writing tensors here.
    """

    def __init__(
        self,
        team: Team,
        read: Callable[[str], Tensor],
        holds: dict[str, Hold],
        device: torch.device,
        *,
        staging_nbytes: int,
    ) -> None:
        self._team = team
        self._read = read
        self._holds = holds
        self._device = device
        self._room = staging_nbytes
        self._staged = 0
        self._flying: deque[_Delivery] = deque()
        self._last_route: tuple[int, ...] | None = None
        self.failure: Exception | None = None

    def carry(self, parcels: Iterable[Parcel], tell: Callable[[int], None]) -> None:
        """Carry all parcels; ``tell`` gets the bytes of each as it leaves.

        Raises:
            CommunicationError: The process group failed.
        """
        try:
            for parcel in parcels:
                self._make_room(parcel)
                self._start(parcel)
                tell(parcel.nbytes)
            while self._flying:
                self._finish()
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {self._team.rank} of {self._team.size}: loading a checkpoint together failed: {error}. An error "
                "or a crash on another rank ends here: look for the first traceback of all ranks."
            ) from error

    def _make_room(self, parcel: Parcel) -> None:
        while self._flying and (len(self._flying) >= _IN_FLIGHT or self._staged + parcel.nbytes > self._room):
            self._finish()
        everyone = len(parcel.route) == self._team.size
        if self._device.type != "cpu" and self._last_route is not None:
            # NCCL may not have a broadcast and a message between two ranks under way at a time.
            while self._flying and everyone != (len(self._last_route) == self._team.size):
                self._finish()
        self._last_route = parcel.route

    def _start(self, parcel: Parcel) -> None:
        team = self._team
        buffer, staged = self._packed(parcel) if team.is_source else self._room_for(parcel)
        delivery = _Delivery(parcel, buffer, staged, [], [])
        if len(parcel.route) == team.size > 1:
            work = dist.broadcast(buffer, team.ranks[0], group=team.group, async_op=True)
            delivery.arrivals = [work]
        else:
            parent, delivery.onward = tree(parcel.route, team.rank)
            if parent is None:
                self._send(delivery)
            else:
                delivery.arrivals = [dist.irecv(buffer, team.ranks[parent], group=team.group)]
        self._staged += staged
        self._flying.append(delivery)

    def _send(self, delivery: _Delivery) -> None:
        ranks = [self._team.ranks[child] for child in delivery.onward]
        delivery.departures = [dist.isend(delivery.buffer, rank, group=self._team.group) for rank in ranks]

    def _finish(self) -> None:
        delivery = self._flying.popleft()
        for work in delivery.arrivals:
            work.wait()
        if not self._team.is_source:
            self._send(delivery)
            self._try(self._unpack, delivery)
        for work in delivery.departures:
            work.wait()
        self._staged -= delivery.staged

    def _packed(self, parcel: Parcel) -> tuple[Tensor, int]:
        """The bytes of a parcel on rank 0, and how much memory they took; what is for rank 0 itself is put there."""
        if parcel.route == (0,):
            for piece in parcel.pieces:
                self._try(self._keep, piece)
            return _NOTHING, 0
        packed: tuple[Tensor, int] | None = self._try(self._pack, parcel)
        # The others wait for so many bytes, even if they mean nothing, as is told at the end.
        return packed or (torch.empty(parcel.nbytes, dtype=torch.uint8, device=self._device), parcel.nbytes)

    def _pack(self, parcel: Parcel) -> tuple[Tensor, int]:
        parts = [self._cut(piece) for piece in parcel.pieces]
        if 0 in parcel.route:
            for piece, (values, _) in zip(parcel.pieces, parts, strict=True):
                self._holds[piece.shipment.key].put(piece, values)
        flat = [values.view(torch.uint8) for values, _ in parts]
        if len(flat) > 1:
            return torch.cat(flat), parcel.nbytes
        return flat[0], parcel.nbytes if parts[0][1] else 0

    def _keep(self, piece: Piece) -> None:
        hold = self._holds[piece.shipment.key]
        if not hold.filled:
            hold.put(piece, self._cut(piece)[0])

    def _cut(self, piece: Piece) -> tuple[Tensor, bool]:
        """The flat values of a piece, ready to be sent, and whether they are a copy."""
        source = self._read(piece.shipment.key).detach()
        values = cut(source, piece.region, piece.box).to(self._device, piece.shipment.dtype)
        values = values.resolve_conj().resolve_neg().contiguous().view(-1)
        return values, values.untyped_storage().data_ptr() != source.untyped_storage().data_ptr()

    def _room_for(self, parcel: Parcel) -> tuple[Tensor, int]:
        window = self._try(self._window, parcel)
        if window is not None:
            return window, 0
        return torch.empty(parcel.nbytes, dtype=torch.uint8, device=self._device), parcel.nbytes

    def _window(self, parcel: Parcel) -> Tensor | None:
        """Where a parcel can be received straight into the memory that it is for."""
        if len(parcel.pieces) > 1:
            return None
        piece = parcel.pieces[0]
        return self._holds[piece.shipment.key].window(piece, self._device)

    def _unpack(self, delivery: _Delivery) -> None:
        if not delivery.staged:
            return
        start = 0
        for piece in delivery.parcel.pieces:
            content = delivery.buffer[start : start + piece.nbytes]
            if content.storage_offset() % piece.shipment.dtype.itemsize:
                content = content.clone()
            self._holds[piece.shipment.key].put(piece, content.view(piece.shipment.dtype))
            start += piece.nbytes

    def _try(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except Exception as error:
            self.failure = self.failure or error
            return None
