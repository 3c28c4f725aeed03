"""Distributes rank 0's checkpoint into the shards of all ranks: allocates memory, sends and receives messages."""

from __future__ import annotations

import copy
import math
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from ppe_ddp.backends.json_collectives import as_text, from_text
from ppe_ddp.errors import CheckpointError
from ppe_ddp.sharding.load_group import LoadGroup, device_of
from ppe_ddp.sharding.load_plan import (
    ExpectedEntry,
    Match,
    Piece,
    ShardLayout,
    SourceEntry,
    TransferMessage,
    check,
    cut,
    describe,
    expect,
    local_of,
    match,
    packed,
    plan_messages,
    route_tensors,
    shape_of,
    takes_anything,
    tree,
    unpacked,
)
from ppe_ddp.torch_internals import IncompatibleKeys, metadata_of, set_metadata

_MESSAGES_A_PIECE = 4  # some are packed while others are in flight
_SHOWN_AFTER = 2.0  # seconds; shorter loads show no bar
_IN_FLIGHT = 16  # enough to keep every receiver busy; each costs a request, not memory


@dataclass(frozen=True)
class LoadOptions:
    """The options of a load; the first five are those of DistModule."""

    process_group: ProcessGroup | None = None
    dtype: Literal["module", "checkpoint"] | None = None
    piece_nbytes: int = 64 << 20
    device: torch.device | str | None = None
    progress: bool | None = None
    assign: bool = True  # make new tensors; if False, overwrite the module's, which must not be on the meta device
    strict: bool = True  # all keys must match
    what: str = "state_dict"  # what is loaded into, for errors
    lends: bool = True  # with ``assign``, rank 0 may keep the checkpoint's own tensors

    def __post_init__(self) -> None:
        if self.dtype not in (None, "module", "checkpoint"):
            raise ValueError(f"dtype should be 'module', 'checkpoint' or None, but it is {self.dtype!r}")
        if self.piece_nbytes < 1:
            raise ValueError(f"piece_nbytes should be positive, but it is {self.piece_nbytes}")

    @property
    def keeps_dtype(self) -> bool:
        """Whether loaded tensors get the module's dtypes."""
        return self.dtype == "module" or (self.dtype is None and not self.assign)

    def compared(self) -> dict[str, Any]:
        """The options that must be equal on all ranks."""
        return {name: getattr(self, name) for name in ("strict", "assign", "dtype", "piece_nbytes")}


def broadcast_and_shard_state_dict(
    state_dict: Mapping[str, Any],
    meta_sharded_state_dict: Mapping[str, Any],
    sharded_state_dict: dict[str, Any],
    *,
    process_group: ProcessGroup | None = None,
    strict: bool = True,
) -> None:
    """Send each rank its shards of ``state_dict``; rank 0 calls this.

    Meanwhile all other ranks must call :func:`shard_broadcasted_state_dict`.

    Args:
        state_dict: The checkpoint, of full tensors. Those that rank 0 needs whole are not copied.
        meta_sharded_state_dict: The state_dict of rank 0's module, of DTensors and tensors on any device, also meta.
        sharded_state_dict: Filled in place, with real tensors that a module can load with ``assign=True``.
        process_group: The ranks that load together; None for the default group.
        strict: Raise if keys are missing or unexpected; the same on every rank.

    Raises:
        ValueError: This is not rank 0 of the group. Nothing was sent.
        CheckpointError: On every rank, with the same text, as from ``DistModule.load_state_dict``.
        CommunicationError: The process group failed.
    """
    load = Load(LoadOptions(process_group, strict=strict))
    if not load.load_group.is_source:
        raise ValueError(
            f"rank {load.load_group.rank} called broadcast_and_shard_state_dict, which is for rank 0 alone; call "
            "shard_broadcasted_state_dict here"
        )
    load.run(lambda: state_dict, lambda: meta_sharded_state_dict)
    sharded_state_dict.update(load.state_dict)


def shard_broadcasted_state_dict(
    meta_sharded_state_dict: Mapping[str, Any],
    sharded_state_dict: dict[str, Any],
    *,
    process_group: ProcessGroup | None = None,
    strict: bool = True,
) -> None:
    """Receive this rank's shards from rank 0, which meanwhile calls :func:`broadcast_and_shard_state_dict`.

    Arguments and errors are those of that function.

    Raises:
        ValueError: This is rank 0 of the group. Nothing was received.
    """
    load = Load(LoadOptions(process_group, strict=strict))
    if load.load_group.is_source:
        raise ValueError(
            "rank 0 called shard_broadcasted_state_dict, which is for the other ranks; call "
            "broadcast_and_shard_state_dict here"
        )
    load.run(dict, lambda: meta_sharded_state_dict)
    sharded_state_dict.update(load.state_dict)


class Load:
    """One rank's part in a load: the entries it has and expects, and its memory, one for tied tensors."""

    def __init__(self, options: LoadOptions) -> None:
        self._options = options
        self.load_group = LoadGroup(options.process_group)
        self.state_dict: OrderedDict[str, Any] = OrderedDict()  # the result, by the keys of the module
        self._checkpoint: Mapping[str, Any] = {}
        self._targets: Mapping[str, Any] = {}
        self._found: dict[str, SourceEntry] = {}
        self._sources: dict[str, str] = {}  # the checkpoint's key for each key of this rank
        self._memories: dict[str, Tensor] = {}  # this rank's region of each tensor, by the key of the checkpoint
        self._filled: set[str] = set()  # keys whose memory is the checkpoint's own
        self._device = torch.device("cpu")  # of messages
        self._staged = 0  # bytes of the buffers of messages under way, without ``_memories``
        self._pending: deque[tuple[Generator[int, None, None], int]] = deque()
        self._last_is_broadcast = False
        self._failure: Exception | None = None  # raised at the end, since other ranks wait for this one's messages

    @torch.no_grad()
    def run(
        self, checkpoint_of: Callable[[], Mapping[str, Any]], targets_of: Callable[[], Mapping[str, Any]]
    ) -> IncompatibleKeys:
        """Send and receive all tensors, on all ranks together. Returns the missing and the unexpected keys."""
        load_group, options = self.load_group, self._options
        header, expectations = self._agree(checkpoint_of, targets_of)
        matched = match(self._found.values(), expectations)
        check(self._found, expectations, matched, strict=options.strict, what=header["what"])
        routed = route_tensors(self._found, expectations, matched, load_group.ranks, converts=options.keeps_dtype)
        self._sources = {key: source for key, source in matched.sources.items() if key in self._targets}
        self._try(self._prepare)
        self._device = device_of(header["wire"])
        messages = plan_messages(routed, load_group.rank, max(1, options.piece_nbytes // _MESSAGES_A_PIECE))
        shown = options.progress if load_group.is_source else False
        with _progress_bar(sum(tensor.nbytes for tensor in routed), shown) as advance:
            load_group.communicate(partial(self._transfer, messages, advance))
        set_metadata(self.state_dict, header["metadata"])

        def finish() -> None:
            if self._failure is not None:
                raise self._failure
            self.state_dict.update(self._loaded())

        load_group.from_each(finish)
        return IncompatibleKeys(matched.missing, matched.unexpected)

    def _agree(
        self, checkpoint_of: Callable[[], Mapping[str, Any]], targets_of: Callable[[], Mapping[str, Any]]
    ) -> tuple[dict[str, Any], list[list[ExpectedEntry]]]:
        """Exchange what rank 0 has and what each rank expects. Returns rank 0's message, and expectations by rank."""
        load_group, options = self.load_group, self._options
        expected: list[ExpectedEntry] = []
        failure: Exception | None = None
        try:
            self._targets = targets_of()
            expected = expect(self._targets, load_group.ranks[load_group.rank])
        except Exception as error:  # raised in answer()
            failure = error

        def make_header() -> dict[str, Any]:
            self._checkpoint = checkpoint_of()
            found = describe(self._checkpoint, is_sent=load_group.size > 1)
            return {
                "content": as_text([list(map(tuple, found)), packed(expected), metadata_of(self._checkpoint)]),
                "options": options.compared(),
                "what": options.what,
                "wire": load_group.wire_kind(self._module_device().type),
            }

        header: dict[str, Any] = load_group.from_source(make_header)
        usual: list[ExpectedEntry] = []

        def answer() -> Any:
            if failure is not None:
                raise failure
            found, sent, header["metadata"] = from_text(header["content"])
            self._found = {key: SourceEntry(key, *rest) for key, *rest in found}
            usual.extend(unpacked(sent))
            own = options.compared()
            if own != header["options"]:
                raise ValueError(f"it loads with {own}, and rank 0 with {header['options']}; they have to be the same")
            if not options.assign:
                _refuse_meta(self._targets, match(self._found.values(), [expected]))
            return None if expected == usual else as_text(packed(expected))

        answers = load_group.from_each(answer)
        return header, [usual if other is None else unpacked(from_text(other)) for other in answers]

    def _module_device(self) -> torch.device:
        """The device of the tensors to make for those on the meta device."""
        if self._options.device is not None:
            return torch.device(self._options.device)
        tensors = [target for target in self._targets.values() if isinstance(target, Tensor)]
        for target in tensors:
            if isinstance(target, DTensor):
                return device_of(target.device_mesh.device_type)
        real = (target.device for target in tensors if not target.is_meta)
        return next(real, device_of(self.load_group.wire_kind("cpu")))

    def _prepare(self) -> None:
        """Allocate the memory; rank 0 takes the checkpoint's own tensors if it may and they fit."""
        device = self._module_device()
        for key, source in self._sources.items():
            if self._found[source].shape is not None and source not in self._memories:
                memory = self._memory(key, self._found[source], device)
                if memory is not None:
                    self._memories[source] = memory
        if not (self._options.lends and self._options.assign and self.load_group.is_source):
            return
        taken = set()
        for key, room in self._memories.items():
            value = self._checkpoint[key].detach()
            same = (value.shape, value.dtype, value.device) == (room.shape, room.dtype, room.device)
            if same and value.is_contiguous() and value.data_ptr() not in taken:
                taken.add(value.data_ptr())
                self._memories[key] = value
                self._filled.add(key)

    def _memory(self, key: str, entry: SourceEntry, device: torch.device) -> Tensor | None:
        """The memory for a key, the module's own or new; None if this rank has no part of the tensor."""
        target = self._targets[key]
        shape: Sequence[int] = entry.shape or ()
        if takes_anything(key, target):
            return torch.empty(shape, dtype=entry.dtype, device=device)
        if not self._options.assign:
            return local_of(target).detach()
        if isinstance(target, DTensor):
            region = ShardLayout.of(target).region(tuple(shape), self.load_group.ranks[self.load_group.rank])
            if region is None:
                return None
            shape = shape_of(region)
        dtype = target.dtype if self._options.keeps_dtype else entry.dtype
        return torch.empty(shape, dtype=dtype, device=device if target.is_meta else target.device)

    def _loaded(self) -> dict[str, Any]:
        """The loaded entries, by the keys of the module. Tied keys get one object, so that they stay tied."""
        made: dict[str, Any] = {}
        result = {}
        uses = Counter(self._sources.values())
        for key, source in self._sources.items():
            if self._found[source].shape is None:
                own = self._checkpoint
                result[key] = copy.deepcopy(own[source]) if source in own else from_text(self._found[source].content)
            elif source in self._memories:
                if source not in made:
                    made[source] = self._wrapped(self._targets[key], self._memories[source], uses[source] > 1)
                result[key] = made[source]
        return result

    def _wrapped(self, target: Any, value: Tensor, tied: bool) -> Any:
        if isinstance(target, DTensor):
            shape = target.shape
            stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
            mesh, placements = target.device_mesh, target.placements
            value = DTensor.from_local(value, mesh, placements, run_check=False, shape=shape, stride=stride)
        # nn.Module would make a new Parameter of a tensor for each name; a Parameter it takes as it is.
        if tied and self._options.assign and isinstance(target, nn.Parameter):
            return nn.Parameter(value, requires_grad=target.requires_grad)
        return value

    # ------------------------------------------------------------------ messages

    def _transfer(self, messages: Iterable[TransferMessage], tell: Callable[[int], object]) -> None:
        """Send and receive messages, whose buffers take at most ``piece_nbytes``; ``tell`` gets the bytes of each."""
        for message in messages:
            self._make_room(message)
            transfer = self._transferred(message)
            if (staged := next(transfer, None)) is not None:
                self._staged += staged
                self._pending.append((transfer, staged))
            tell(message.nbytes)
        while self._pending:
            self._finish()

    def _is_broadcast(self, message: TransferMessage) -> bool:
        return len(message.route) == self.load_group.size > 1

    def _make_room(self, message: TransferMessage) -> None:
        room = self._options.piece_nbytes - message.nbytes
        while self._pending and (len(self._pending) >= _IN_FLIGHT or self._staged > room):
            self._finish()
        # NCCL must not have a broadcast and a message between two ranks in flight at the same time.
        is_broadcast = self._is_broadcast(message)
        while self._pending and self._device.type != "cpu" and is_broadcast != self._last_is_broadcast:
            self._finish()
        self._last_is_broadcast = is_broadcast

    def _finish(self) -> None:
        transfer, staged = self._pending.popleft()
        next(transfer, None)
        self._staged -= staged

    def _transferred(self, message: TransferMessage) -> Generator[int, None, None]:
        """Start a message, yield the bytes of its buffer, and end it when resumed; one for rank 0 alone is a copy."""
        ranks, group, is_source = self.load_group.ranks, self.load_group.group, self.load_group.is_source
        if message.route == (0,):
            for piece in message.pieces:
                self._try(self._keep, piece)
            return
        held = self._try(self._pack if is_source else self._window, message)
        # After an error the other ranks still wait for as many bytes; they get the error at the end.
        buffer, staged = held or (torch.empty(message.nbytes, dtype=torch.uint8, device=self._device), message.nbytes)
        children: list[int] = []
        received: Any = None
        if self._is_broadcast(message):
            received = dist.broadcast(buffer, ranks[0], group=group, async_op=True)
        else:
            parent, children = tree(message.route, self.load_group.rank)
            received = None if parent is None else dist.irecv(buffer, ranks[parent], group=group)
        sent = [dist.isend(buffer, ranks[child], group=group) for child in children] if is_source else []
        yield staged
        if received is not None:
            self.load_group.wait(received, buffer.device)
        if not is_source:
            sent = [dist.isend(buffer, ranks[child], group=group) for child in children]
            if staged:
                self._try(self._unpack, message, buffer)
        for work in sent:
            self.load_group.wait(work, buffer.device)

    def _put(self, piece: Piece, values: Tensor) -> None:
        """Copy the flat ``values`` of a piece into this rank's memory, converted to its dtype."""
        key = piece.routed.key
        if key not in self._filled:
            place = self._memories[key]
            for dim, (start, stop) in enumerate(piece.box):
                place = place.narrow(dim, start, stop - start)
            place.copy_(values.view(place.shape))

    def _keep(self, piece: Piece) -> None:
        if piece.routed.key not in self._filled:
            self._put(piece, self._cut(piece)[0])

    def _pack(self, message: TransferMessage) -> tuple[Tensor, int]:
        """The bytes of a message that rank 0 sends, and how many of them are a copy; stores rank 0's own part."""
        parts = [self._cut(piece) for piece in message.pieces]
        if 0 in message.route:
            for piece, (values, _) in zip(message.pieces, parts, strict=True):
                self._put(piece, values)
        flat = [values.view(torch.uint8) for values, _ in parts]
        if len(flat) > 1:
            return torch.cat(flat), message.nbytes
        return flat[0], message.nbytes if parts[0][1] else 0

    def _cut(self, piece: Piece) -> tuple[Tensor, bool]:
        """The flat values of a piece in the dtype of messages, and whether they are a copy."""
        source = self._checkpoint[piece.routed.key].detach()
        values = cut(source, piece.region, piece.box).to(self._device, piece.routed.dtype)
        values = _flat(values.resolve_conj().resolve_neg().contiguous())
        return values, values.untyped_storage().data_ptr() != source.untyped_storage().data_ptr()

    def _window(self, message: TransferMessage) -> tuple[Tensor, int] | None:
        """This rank's memory as the buffer of a message, if the message can be received straight into it."""
        if len(message.pieces) > 1:
            return None
        piece = message.pieces[0]
        target = self._memories[piece.routed.key]
        if target.device != self._device or target.dtype is not piece.routed.dtype or not target.is_contiguous():
            return None
        return _flat(target)[piece.offset : piece.offset + piece.numel].view(torch.uint8), 0

    def _unpack(self, message: TransferMessage, buffer: Tensor) -> None:
        start = 0
        for piece in message.pieces:
            content = buffer[start : start + piece.nbytes]
            if content.storage_offset() % piece.routed.dtype.itemsize:
                content = content.clone()
            self._put(piece, content.view(piece.routed.dtype))
            start += piece.nbytes

    def _try(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except Exception as error:
            self._failure = self._failure or error
            return None


def _flat(tensor: Tensor) -> Tensor:
    """A contiguous tensor as one dimension; ``view(-1)`` keeps the stride of a single element, which may be any."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _refuse_meta(targets: Mapping[str, Any], matched: Match) -> None:
    meta = [key for key in matched.sources if isinstance(targets[key], Tensor) and targets[key].is_meta]
    if meta:
        raise CheckpointError(
            f"{len(meta)} entries of the module are on the meta device, such as {meta[0]!r}, and have no memory to "
            "load into: pass assign=True, or call to_empty() first"
        )


@contextmanager
def _progress_bar(total: int, shown: bool | None) -> Iterator[Callable[[int], object]]:
    """A progress bar, by default only on a terminal and in a long load; gives the function that counts bytes."""
    bar: AbstractContextManager[Any] = nullcontext()
    if shown or (shown is None and sys.stderr.isatty()):
        with suppress(ImportError):
            from tqdm import tqdm

            size = {"unit": "B", "unit_scale": True, "unit_divisor": 1024}
            bar = tqdm(total=total, desc="loading", leave=False, delay=_SHOWN_AFTER, file=sys.stderr, **size)
    with bar as counter:
        yield counter.update if counter is not None else lambda nbytes: None
