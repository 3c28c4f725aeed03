"""Distributes a checkpoint from rank 0 into the shards of all ranks: matches keys, plans messages, sends them."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ppe_ddp.engine.torch_internals import metadata_of
from ppe_ddp.sharding.checkpoint_entries import ExpectedEntry, SourceEntry, describe, expect
from ppe_ddp.sharding.entry_json import (
    expectations_from_json,
    expectations_to_json,
    sources_from_json,
    sources_to_json,
)
from ppe_ddp.sharding.key_matching import Match, check, match
from ppe_ddp.sharding.load_group import LoadGroup, device_of
from ppe_ddp.sharding.load_targets import LoadTargets, device_for, refuse_meta
from ppe_ddp.sharding.plain_values import dump_plain, load_plain
from ppe_ddp.sharding.progress_bar import ProgressBar
from ppe_ddp.sharding.tensor_routing import route_tensors
from ppe_ddp.sharding.tensor_transfer import TensorTransfer
from ppe_ddp.sharding.transfer_plan import plan_messages

if TYPE_CHECKING:
    from ppe_ddp.sharding.load_options import LoadOptions

_MESSAGES_A_PIECE = 4  # some are packed while others are in flight


@dataclass(frozen=True)
class Distributed:
    """The tensors that one rank got.

    Attributes:
        state_dict: Its entries, by the keys of its module; DTensors where the module has them.
        missing: Keys of the module that the checkpoint lacks; the same on every rank.
        unexpected: Keys of the checkpoint that the module lacks; the same on every rank.
    """

    state_dict: dict[str, Any]
    missing: list[str]
    unexpected: list[str]


@dataclass(frozen=True)
class LoadTerms:
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
        """The terms that must be equal on all ranks."""
        dtype, piece_nbytes = self.options.dtype, self.options.piece_nbytes
        return {"strict": self.strict, "assign": self.fresh, "dtype": dtype, "piece_nbytes": piece_nbytes}


@dataclass(frozen=True)
class _Header:
    """The first message of rank 0 to the others.

    Attributes:
        found: What the checkpoint has.
        expected: What rank 0's module has, most often the same as everywhere.
        terms: How it loads.
        what: The name of what is loaded into.
        metadata: The ``_metadata`` of torch's state_dicts: versions of modules, as bytes.
        wire: The type of device whose tensors are sent.
    """

    found: list[SourceEntry]
    expected: list[ExpectedEntry]
    terms: dict[str, Any]
    what: str
    metadata: bytes
    wire: str

    def to_json(self) -> Any:
        """What is sent."""
        own = {"terms": self.terms, "what": self.what, "metadata": b64encode(self.metadata).decode(), "wire": self.wire}
        return own | {"found": sources_to_json(self.found), "expected": expectations_to_json(self.expected)}

    @classmethod
    def from_json(cls, sent: Any) -> _Header:
        """What has come."""
        return cls(
            found=sources_from_json(sent["found"]),
            expected=expectations_from_json(sent["expected"]),
            terms=sent["terms"],
            what=sent["what"],
            metadata=b64decode(sent["metadata"]),
            wire=sent["wire"],
        )


class Distribution:
    """Brings the tensors of rank 0's checkpoint to where they belong; every rank of a load group runs one, together.

    Args:
        checkpoint_of: Gives the checkpoint: full tensors, and other entries. Called on rank 0 only.
        targets_of: Gives what this rank's module has: DTensors, tensors, and other entries.
        terms: How.
    """

    def __init__(
        self,
        checkpoint_of: Callable[[], Mapping[str, Any]],
        targets_of: Callable[[], Mapping[str, Any]],
        terms: LoadTerms,
    ) -> None:
        self._checkpoint_of = checkpoint_of
        self._targets_of = targets_of
        self._terms = terms
        self._options = terms.options
        self._load_group = LoadGroup(terms.options.process_group)
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
            result = self._transfer(header, expectations, matched)
        return Distributed(result, matched.missing, matched.unexpected)

    def _agree(self) -> tuple[_Header, list[list[ExpectedEntry]]]:
        """What rank 0 has, and what each rank expects."""
        load_group = self._load_group
        expected: list[ExpectedEntry] = []
        failure: Exception | None = None
        try:
            self._targets = self._targets_of()
            expected = expect(self._targets, load_group.ranks[load_group.rank])
        except Exception as error:  # raised below, on all ranks
            failure = error
        header = _Header.from_json(load_group.from_source(lambda: self._make_header(expected).to_json()))

        def answer() -> Any:
            if failure is not None:
                raise failure
            terms = self._terms.compared()
            if terms != header.terms:
                raise ValueError(f"it loads with {terms}, and rank 0 with {header.terms}; they have to be the same")
            if not self._terms.fresh:
                refuse_meta(self._targets, match(header.found, [expected]))
            return None if expected == header.expected else expectations_to_json(expected)

        answers = load_group.from_each(answer)
        return header, [header.expected if other is None else expectations_from_json(other) for other in answers]

    def _make_header(self, expected: list[ExpectedEntry]) -> _Header:
        self._checkpoint = self._checkpoint_of()
        device = device_for(self._targets, self._load_group, self._options)
        return _Header(
            found=describe(self._checkpoint, is_sent=self._load_group.size > 1),
            expected=expected,
            terms=self._terms.compared(),
            what=self._terms.what,
            metadata=dump_plain(metadata_of(self._checkpoint)),
            wire=self._load_group.wire_kind(device.type),
        )

    def _transfer(self, header: _Header, expectations: list[list[ExpectedEntry]], matched: Match) -> dict[str, Any]:
        """What this rank's module gets."""
        load_group, options, fresh = self._load_group, self._options, self._terms.fresh
        load_targets = LoadTargets(self._targets, matched, header.found, load_group, options, fresh=fresh)
        if self._terms.lends and fresh and load_group.is_source:
            load_targets.borrow(self._checkpoint)
        routed_tensors = route_tensors(
            header.found, expectations, matched, load_group.ranks, converts=options.keeps_dtype(fresh)
        )
        read = self._checkpoint.__getitem__
        transfer = TensorTransfer(
            load_group, read, load_targets.memories, device_of(header.wire), staging_nbytes=options.piece_nbytes
        )
        transfer.failure = load_targets.failure
        bar = ProgressBar(
            sum(routed.nbytes for routed in routed_tensors), options.progress if load_group.is_source else False
        )
        try:
            transfer.run(
                plan_messages(routed_tensors, load_group.rank, max(1, options.piece_nbytes // _MESSAGES_A_PIECE)),
                bar.advance,
            )
        finally:
            bar.close()
        result: OrderedDict[str, Any] = OrderedDict()
        result._metadata = load_plain(header.metadata)  # type: ignore[attr-defined]

        def finish() -> None:
            if transfer.failure is not None:
                raise transfer.failure
            result.update(load_targets.state_dict(header.found, self._checkpoint))

        load_group.from_each(finish)
        return result
