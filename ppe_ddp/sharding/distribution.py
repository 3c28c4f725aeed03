"""Loads a checkpoint that one rank has into the shards of all: agree on the keys, plan, carry."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ppe_ddp.sharding.agreement import Match, check, match
from ppe_ddp.sharding.contents import Expected, Found, describe, expect
from ppe_ddp.sharding.courier import Courier
from ppe_ddp.sharding.holdings import Holdings, device_for, refuse_meta
from ppe_ddp.sharding.plan import parcels
from ppe_ddp.sharding.progress import Bar
from ppe_ddp.sharding.shipments import shipments
from ppe_ddp.sharding.team import Team, device_of

if TYPE_CHECKING:
    from ppe_ddp.sharding.options import LoadOptions

_PARCELS_A_PIECE = 4  # some are packed while others travel


@dataclass(frozen=True)
class Distributed:
    """What one rank got.

    Attributes:
        state_dict: Its entries, by the keys of its module; DTensors where the module has them.
        missing: Keys of the module that the checkpoint lacks; the same on every rank.
        unexpected: Keys of the checkpoint that the module lacks; the same on every rank.
    """

    state_dict: dict[str, Any]
    missing: list[str]
    unexpected: list[str]


@dataclass(frozen=True)
class Terms:
    """How a load is done; the same on every rank.

    Attributes:
        fresh: Whether loaded tensors get memory of their own. If not, the module's are overwritten, and none that the
            checkpoint has may be on the meta device.
        strict: Whether all keys must match.
        options: What the user chose.
        what: The name of what is loaded into, for errors.
        lends: Whether rank 0 may keep the checkpoint's own memory where that is all it needs, if ``fresh``.
    """

    fresh: bool
    strict: bool
    options: LoadOptions
    what: str
    lends: bool

    def compared(self) -> dict[str, Any]:
        """What must not differ between ranks."""
        dtype, piece_nbytes = self.options.dtype, self.options.piece_nbytes
        return {"strict": self.strict, "assign": self.fresh, "dtype": dtype, "piece_nbytes": piece_nbytes}


@dataclass(frozen=True)
class _Header:
    """What rank 0 tells the others first.

    Attributes:
        found: What the checkpoint has.
        expected: What rank 0's module has, most often the same as everywhere.
        terms: How it loads.
        what: The name of what is loaded into.
        metadata: The ``_metadata`` of torch's state_dicts: versions of modules.
        wire: The type of device whose tensors are sent.
    """

    found: list[Found]
    expected: list[Expected]
    terms: dict[str, Any]
    what: str
    metadata: Any
    wire: str


class Distribution:
    """Brings the tensors of rank 0's checkpoint to where they belong; every rank of a team runs one, together.

    Args:
        checkpoint_of: Gives the checkpoint: full tensors, and other entries, which are pickled. Called on rank 0 only.
        targets_of: Gives what this rank's module has: DTensors, tensors, and other entries.
        terms: How.
    """

    def __init__(
        self,
        checkpoint_of: Callable[[], Mapping[str, Any]],
        targets_of: Callable[[], Mapping[str, Any]],
        terms: Terms,
    ) -> None:
        self._checkpoint_of = checkpoint_of
        self._targets_of = targets_of
        self._terms = terms
        self._options = terms.options
        self._team = Team(terms.options.process_group)
        self._checkpoint: Mapping[str, Any] = {}
        self._targets: Mapping[str, Any] = {}

    def run(self) -> Distributed:
        """Load.

        Raises:
            CheckpointError: On every rank, with the same text: the checkpoint does not fit, or a rank failed. If the
                module's own memory is loaded into, it may then have some, all or none of the new values.
            CommunicationError: The process group failed.
        """
        with torch.no_grad():
            header, expectations = self._agree()
            matched = match(header.found, expectations)
            check(header.found, expectations, matched, strict=self._terms.strict, what=header.what)
            result = self._carry(header, expectations, matched)
        return Distributed(result, matched.missing, matched.unexpected)

    def _agree(self) -> tuple[_Header, list[list[Expected]]]:
        """What rank 0 has, and what each rank expects."""
        team = self._team
        expected: list[Expected] = []
        failure: Exception | None = None
        try:
            self._targets = self._targets_of()
            expected = expect(self._targets, team.ranks[team.rank])
        except Exception as error:  # told where all listen
            failure = error
        header = team.from_source(lambda: self._head(expected))

        def answer() -> list[Expected] | None:
            if failure is not None:
                raise failure
            terms = self._terms.compared()
            if terms != header.terms:
                raise ValueError(f"it loads with {terms}, and rank 0 with {header.terms}; they have to be the same")
            if not self._terms.fresh:
                refuse_meta(self._targets, match(header.found, [expected]))
            return None if expected == header.expected else expected

        return header, [header.expected if other is None else other for other in team.from_each(answer)]

    def _head(self, expected: list[Expected]) -> _Header:
        self._checkpoint = self._checkpoint_of()
        device = device_for(self._targets, self._team, self._options)
        return _Header(
            found=describe(self._checkpoint),
            expected=expected,
            terms=self._terms.compared(),
            what=self._terms.what,
            metadata=getattr(self._checkpoint, "_metadata", None),
            wire=self._team.wire_kind(device.type),
        )

    def _carry(self, header: _Header, expectations: list[list[Expected]], matched: Match) -> dict[str, Any]:
        """What this rank's module gets."""
        team, options, fresh = self._team, self._options, self._terms.fresh
        holdings = Holdings(self._targets, matched, header.found, team, options, fresh=fresh)
        if self._terms.lends and fresh and team.is_source:
            holdings.borrow(self._checkpoint)
        goods = shipments(header.found, expectations, matched, team.ranks, converts=options.keeps_dtype(fresh))
        read = self._checkpoint.__getitem__
        courier = Courier(team, read, holdings.holds, device_of(header.wire), staging_nbytes=options.piece_nbytes)
        courier.failure = holdings.failure
        bar = Bar(sum(shipment.nbytes for shipment in goods), options.progress if team.is_source else False)
        try:
            courier.carry(parcels(goods, team.rank, max(1, options.piece_nbytes // _PARCELS_A_PIECE)), bar.advance)
        finally:
            bar.close()
        result: OrderedDict[str, Any] = OrderedDict()
        result._metadata = header.metadata  # type: ignore[attr-defined]

        def finish() -> None:
            if courier.failure is not None:
                raise courier.failure
            result.update(holdings.state_dict(header.found))

        team.from_each(finish)
        return result
