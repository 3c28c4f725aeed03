"""Loads a state_dict that one rank has into the shards of all: agree on the keys, plan, carry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ppe_ddp.sharding.agreement import check, match
from ppe_ddp.sharding.contents import Expected, Found, describe, expect
from ppe_ddp.sharding.courier import Courier
from ppe_ddp.sharding.holdings import Holdings, device_for, refuse_meta
from ppe_ddp.sharding.plan import parcels
from ppe_ddp.sharding.progress import Bar
from ppe_ddp.sharding.shipments import shipments
from ppe_ddp.sharding.team import Team, device_of

if TYPE_CHECKING:
    import torch

    from ppe_ddp.sharding.options import LoadOptions
    from ppe_ddp.sharding.plan import Shipment

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
class _Header:
    """What rank 0 tells the others first.

    Attributes:
        found: What the checkpoint has.
        expected: What rank 0's module has, most often the same as everywhere.
        terms: How it loads, which has to be the same everywhere.
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


def distribute(
    state_dict: Mapping[str, Any],
    targets_of: Callable[[], Mapping[str, Any]],
    options: LoadOptions,
    *,
    fresh: bool,
    strict: bool = True,
    what: str = "the module",
    lends: bool = False,
) -> Distributed:
    """Bring the tensors of rank 0's checkpoint to where they belong; every rank of the team must call this together.

    Args:
        state_dict: The checkpoint: full tensors, and other entries, which are pickled. Looked at on rank 0 only.
        targets_of: Gives what this rank's module has: DTensors, tensors, and other entries.
        options: The same on every rank.
        fresh: Whether loaded tensors get memory of their own. If not, the targets are overwritten, and none that the
            checkpoint has may be on the meta device.
        strict: Whether all keys must match.
        what: The name of what is loaded into, for errors.
        lends: Whether rank 0 may keep the checkpoint's own memory where that is all it needs, if ``fresh``.

    Raises:
        CheckpointError: On every rank, with the same text: the checkpoint does not fit, or a rank failed. With
            ``fresh=False`` the targets may then have some, all or none of the new values.
        CommunicationError: The process group failed.
    """
    team = Team(options.process_group)
    terms = {"strict": strict, "assign": fresh, "dtype": options.dtype, "piece_nbytes": options.piece_nbytes}
    targets: Mapping[str, Any] = {}
    expected: list[Expected] = []
    failure: Exception | None = None
    try:
        targets = targets_of()
        expected = expect(targets, team.ranks[team.rank])
    except Exception as error:  # told where all listen
        failure = error

    def head() -> _Header:
        wire = team.wire_kind(device_for(targets, team, options).type)
        return _Header(describe(state_dict), expected, terms, what, getattr(state_dict, "_metadata", None), wire)

    header = team.from_source(head)

    def answer() -> list[Expected] | None:
        if failure is not None:
            raise failure
        if terms != header.terms:
            raise ValueError(f"it loads with {terms}, and rank 0 with {header.terms}; they have to be the same")
        if not fresh:
            refuse_meta(targets, match(header.found, [expected]))
        return None if expected == header.expected else expected

    expectations = [header.expected if differing is None else differing for differing in team.from_each(answer)]
    matched = match(header.found, expectations)
    check(header.found, expectations, matched, strict=strict, what=header.what)
    holdings = Holdings(targets, matched, header.found, team, options, fresh=fresh)
    if lends and fresh and team.is_source:
        holdings.borrow(state_dict)
    goods = shipments(header.found, expectations, matched, team.ranks, converts=options.keeps_dtype(fresh))
    _carry(team, state_dict, holdings, goods, device_of(header.wire), options)
    result = holdings.state_dict(header.found)
    result._metadata = header.metadata  # type: ignore[attr-defined]
    return Distributed(result, matched.missing, matched.unexpected)


def _carry(
    team: Team,
    state_dict: Mapping[str, Any],
    holdings: Holdings,
    goods: list[Shipment],
    wire: torch.device,
    options: LoadOptions,
) -> None:
    courier = Courier(team, state_dict.__getitem__, holdings.holds, wire, staging_nbytes=options.piece_nbytes)
    courier.failure = holdings.failure
    bar = Bar(sum(shipment.nbytes for shipment in goods), options.progress if team.is_source else False)
    most = max(1, options.piece_nbytes // _PARCELS_A_PIECE)
    try:
        courier.carry(parcels(goods, team.rank, most), bar.advance)
    finally:
        bar.close()

    def tell() -> None:
        if courier.failure is not None:
            raise courier.failure

    team.from_each(tell)
