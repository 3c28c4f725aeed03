"""Distributes a checkpoint from rank 0 into the shards of all ranks: options, public functions, and how it is done."""

from __future__ import annotations

import sys
from base64 import b64decode, b64encode
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from ppe_ddp.sharding.checkpoint_entries import (
    ExpectedEntry,
    SourceEntry,
    check,
    describe,
    expect,
    expectations_from_json,
    expectations_to_json,
    match,
    sources_from_json,
    sources_to_json,
)
from ppe_ddp.sharding.checkpoint_reader import dump_plain, load_plain
from ppe_ddp.sharding.load_group import LoadGroup, device_of
from ppe_ddp.sharding.tensor_transfer import LoadTargets, TensorTransfer, device_for, refuse_meta
from ppe_ddp.sharding.transfer_plan import RoutedTensor, plan_messages, route_tensors
from ppe_ddp.torch_internals import metadata_of, set_metadata

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_MESSAGES_A_PIECE = 4  # some are packed while others are in flight
_SHOWN_AFTER = 2.0  # seconds; shorter loads show no bar


@dataclass(frozen=True)
class LoadOptions:
    """The options of a load; the first five are those of DistModule.

    Attributes:
        fresh: Loaded tensors get memory of their own. If not, the module's are overwritten, and none that the
            checkpoint has may be on the meta device.
        strict: All keys must match.
        what: The name of what is loaded into, for errors.
        lends: Rank 0 may keep the checkpoint's own memory where that is all it needs, if ``fresh``.
    """

    process_group: ProcessGroup | None = None
    dtype: Literal["module", "checkpoint"] | None = None
    piece_nbytes: int = 64 << 20
    device: torch.device | str | None = None
    progress: bool | None = None
    fresh: bool = True
    strict: bool = True
    what: str = "state_dict"
    lends: bool = True

    def __post_init__(self) -> None:
        if self.dtype not in (None, "module", "checkpoint"):
            raise ValueError(f"dtype should be 'module', 'checkpoint' or None, but it is {self.dtype!r}")
        if self.piece_nbytes < 1:
            raise ValueError(f"piece_nbytes should be positive, but it is {self.piece_nbytes}")

    @property
    def keeps_dtype(self) -> bool:
        """Whether loaded tensors get the module's dtypes."""
        return self.dtype == "module" or (self.dtype is None and not self.fresh)

    def compared(self) -> dict[str, Any]:
        """The options that must be equal on all ranks."""
        return {"strict": self.strict, "assign": self.fresh, "dtype": self.dtype, "piece_nbytes": self.piece_nbytes}


class Distributed(NamedTuple):
    """The tensors that one rank got.

    Attributes:
        state_dict: Its entries, by the keys of its module; DTensors where the module has them.
        missing: Keys of the module that the checkpoint lacks; the same on every rank.
        unexpected: Keys of the checkpoint that the module lacks; the same on every rank.
    """

    state_dict: dict[str, Any]
    missing: list[str]
    unexpected: list[str]


def distribute(
    checkpoint_of: Callable[[], Mapping[str, Any]], targets_of: Callable[[], Mapping[str, Any]], options: LoadOptions
) -> Distributed:
    """Bring the tensors of rank 0's checkpoint to where they belong; every rank of the group calls this, together.

    Args:
        checkpoint_of: Gives the checkpoint: full tensors, and other entries. Called on rank 0 only.
        targets_of: Gives what this rank's module has: DTensors, tensors, and other entries.
        options: How.

    Raises:
        CheckpointError: On every rank, with the same text: the checkpoint does not fit, or a rank failed. If the
            module's own memory is loaded into, it may then have some, all or none of the new values.
        CommunicationError: The process group failed.
    """
    with torch.no_grad():
        return _Distribution(options).run(checkpoint_of, targets_of)


def broadcast_and_shard_state_dict(
    state_dict: Mapping[str, Any],
    meta_sharded_state_dict: Mapping[str, Any],
    sharded_state_dict: dict[str, Any],
    *,
    process_group: ProcessGroup | None = None,
    strict: bool = True,
) -> None:
    """Send the full tensors of ``state_dict`` to where they belong, and keep rank 0's own shards.

    Rank 0 calls this while all others call :func:`shard_broadcasted_state_dict`.

    Args:
        state_dict: The checkpoint: full tensors. Tensors that rank 0 needs whole are taken over without a copy.
        meta_sharded_state_dict: What rank 0's module has; DTensors and tensors, on the meta device or not.
        sharded_state_dict: Filled in place, with real tensors that a module can load with ``assign=True``.
        process_group: The ranks that load together; None for the default group.
        strict: Whether all keys must match; the same on every rank.

    Raises:
        ValueError: This is not rank 0 of the group. Nothing was sent.
        CheckpointError: On every rank, with the same text, as from ``DistModule.load_state_dict``.
        CommunicationError: The process group failed.
    """
    options = LoadOptions(process_group, strict=strict)
    load_group = LoadGroup(process_group)
    if not load_group.is_source:
        raise ValueError(
            f"rank {load_group.rank} called broadcast_and_shard_state_dict, which is for rank 0 alone; call "
            "shard_broadcasted_state_dict here"
        )
    sharded_state_dict.update(distribute(lambda: state_dict, lambda: meta_sharded_state_dict, options).state_dict)


def shard_broadcasted_state_dict(
    meta_sharded_state_dict: Mapping[str, Any],
    sharded_state_dict: dict[str, Any],
    *,
    process_group: ProcessGroup | None = None,
    strict: bool = True,
) -> None:
    """Receive this rank's shards from rank 0, which calls :func:`broadcast_and_shard_state_dict` meanwhile.

    Args:
        meta_sharded_state_dict: What this rank's module has; DTensors and tensors, on the meta device or not.
        sharded_state_dict: Filled in place, with real tensors that a module can load with ``assign=True``.
        process_group: The ranks that load together; None for the default group.
        strict: Whether all keys must match; the same on every rank.

    Raises:
        ValueError: This is rank 0 of the group. Nothing was received.
        CheckpointError: On every rank, with the same text, as from ``DistModule.load_state_dict``.
        CommunicationError: The process group failed.
    """
    options = LoadOptions(process_group, strict=strict)
    if LoadGroup(process_group).is_source:
        raise ValueError(
            "rank 0 called shard_broadcasted_state_dict, which is for the other ranks; call "
            "broadcast_and_shard_state_dict here"
        )
    sharded_state_dict.update(distribute(dict, lambda: meta_sharded_state_dict, options).state_dict)


class _Distribution:
    """One rank's part in a load."""

    def __init__(self, options: LoadOptions) -> None:
        self._options = options
        self._load_group = LoadGroup(options.process_group)
        self._checkpoint: Mapping[str, Any] = {}
        self._targets: Mapping[str, Any] = {}
        self._found: list[SourceEntry] = []
        self._expectations: list[list[ExpectedEntry]] = []

    def run(
        self, checkpoint_of: Callable[[], Mapping[str, Any]], targets_of: Callable[[], Mapping[str, Any]]
    ) -> Distributed:
        load_group, options = self._load_group, self._options
        header = self._agree(checkpoint_of, targets_of)
        matched = match(self._found, self._expectations)
        check(self._found, self._expectations, matched, strict=options.strict, what=header["what"])
        routed = route_tensors(self._found, self._expectations, matched, load_group.ranks, converts=options.keeps_dtype)
        device = device_for(self._targets, load_group, options.device)
        load_targets = LoadTargets(
            self._targets, matched, self._found, device, fresh=options.fresh, keeps_dtype=options.keeps_dtype
        )
        lends = options.lends and options.fresh and load_group.is_source
        load_targets.prepare(load_group.ranks[load_group.rank], self._checkpoint if lends else None)
        failure = self._transfer(routed, load_targets, device_of(header["wire"]))
        result: OrderedDict[str, Any] = OrderedDict()
        set_metadata(result, load_plain(b64decode(header["metadata"])))

        def finish() -> None:
            if failure is not None:
                raise failure
            result.update(load_targets.state_dict(self._checkpoint))

        load_group.from_each(finish)
        return Distributed(result, matched.missing, matched.unexpected)

    def _agree(
        self, checkpoint_of: Callable[[], Mapping[str, Any]], targets_of: Callable[[], Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Exchange what rank 0 has and what each rank expects.

        Returns:
            Rank 0's first message to the others.
        """
        load_group, options = self._load_group, self._options
        expected: list[ExpectedEntry] = []
        failure: Exception | None = None
        try:
            self._targets = targets_of()
            expected = expect(self._targets, load_group.ranks[load_group.rank])
        except Exception as error:  # raised below, on all ranks
            failure = error

        def make_header() -> dict[str, Any]:
            self._checkpoint = checkpoint_of()
            device = device_for(self._targets, load_group, options.device)
            return {
                "found": sources_to_json(describe(self._checkpoint, is_sent=load_group.size > 1)),
                "expected": expectations_to_json(expected),  # most often the same as everywhere
                "options": options.compared(),
                "what": options.what,
                "metadata": b64encode(dump_plain(metadata_of(self._checkpoint))).decode(),
                "wire": load_group.wire_kind(device.type),
            }

        header: dict[str, Any] = load_group.from_source(make_header)
        self._found = sources_from_json(header["found"])
        usual = expectations_from_json(header["expected"])

        def answer() -> Any:
            if failure is not None:
                raise failure
            own = options.compared()
            if own != header["options"]:
                raise ValueError(f"it loads with {own}, and rank 0 with {header['options']}; they have to be the same")
            if not options.fresh:
                refuse_meta(self._targets, match(self._found, [expected]))
            return None if expected == usual else expectations_to_json(expected)

        answers = load_group.from_each(answer)
        self._expectations = [usual if other is None else expectations_from_json(other) for other in answers]
        return header

    def _transfer(
        self, routed: list[RoutedTensor], load_targets: LoadTargets, device: torch.device
    ) -> Exception | None:
        """Send and receive; returns the first error with a tensor of this rank."""
        load_group, options = self._load_group, self._options
        read = self._checkpoint.__getitem__
        transfer = TensorTransfer(load_group, read, load_targets.memories, device, staging_nbytes=options.piece_nbytes)
        transfer.failure = load_targets.failure
        messages = plan_messages(routed, load_group.rank, max(1, options.piece_nbytes // _MESSAGES_A_PIECE))
        shown = options.progress if load_group.is_source else False
        with _progress_bar(sum(tensor.nbytes for tensor in routed), shown) as advance:
            transfer.run(messages, advance)
        return transfer.failure


@contextmanager
def _progress_bar(total: int, shown: bool | None) -> Iterator[Callable[[int], object]]:
    """Show a bar once a load takes long; gives the function that counts bytes.

    Args:
        total: Bytes in all.
        shown: None for a terminal only; True also where stderr is a file; False for never.
    """
    bar: AbstractContextManager[Any] = nullcontext()
    if shown or (shown is None and sys.stderr.isatty()):
        with suppress(ImportError):
            from tqdm import tqdm

            size = {"unit": "B", "unit_scale": True, "unit_divisor": 1024}
            bar = tqdm(total=total, desc="loading", leave=False, delay=_SHOWN_AFTER, file=sys.stderr, **size)
    with bar as counter:
        yield counter.update if counter is not None else lambda nbytes: None
