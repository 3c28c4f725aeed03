"""Keeps parameters and buffers the same on all ranks: broadcasts them, and compares them.

A module's buffers are broadcast after backward. A rank that does not use a submodule (a tower, an expert) has old
values of its buffers. So the buffers of each submodule come from the lowest rank that has written any of them since the
last broadcast.

A retained graph, or the graph of another forward, may still need the buffers' old values. Which buffers that concerns
may differ from rank to rank. So every rank broadcasts the same list, with a copy in place of each such buffer.

Parameters stay the same as long as all ranks change them alike. This is checked, one part at a time:

    every 8th synchronization    While its last messages are in flight, the memory of an 11th of the parameters is
                                 summed up as integers, tensor by tensor.
    the next such vote           It carries a digest of the sums: 24 bytes for any number of ranks.
    if the digests differ        One more message, with the sums of all ranks, finds the ranks and parameters.

Between a synchronization and the optimizer's step all ranks have the same parameters, with any optimizer.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate, compress
from operator import is_
from sys import getrefcount
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import ProcessGroup

from ppe_ddp.backends.group_internals import is_registered
from ppe_ddp.contracts import BroadcastFunction, is_waitable
from ppe_ddp.engine.completion import Steps, run
from ppe_ddp.engine.failures import START
from ppe_ddp.engine.groups import Groups
from ppe_ddp.engine.mask_exchange import is_same, with_complement
from ppe_ddp.engine.memory import allocator
from ppe_ddp.engine.module import ModuleState, is_expanded, local_tensor
from ppe_ddp.engine.negotiation import Negotiation, all_reduced
from ppe_ddp.engine.plan import ParameterSpec
from ppe_ddp.engine.reduction import annotate, refuse_late
from ppe_ddp.engine.zero.parameter_gather import PendingParameter, wait_for
from ppe_ddp.engine.zero.shards import flattened, is_dense
from ppe_ddp.errors import CommunicationError, DisagreementError, FunctionError, PeerAbortedError
from ppe_ddp.functions import broadcast, name_of
from ppe_ddp.torch_internals import (
    buffer_table,
    only_writes_buffers,
    preserve_versions,
    storage_users,
    tensor_users,
    version_of,
)
from ppe_ddp.waiting import awaited_once, probe

Place = tuple[nn.Module, str]
# By the name of a module's buffer: the buffer as it was when all ranks had the same, and its version.
_Known = dict[str, tuple[Tensor | None, int]]
_Table = weakref.WeakKeyDictionary[nn.Module, _Known]

logger = logging.getLogger("ppe_ddp")


def broadcast_all(function: BroadcastFunction, tensors: Sequence[Tensor], groups: Groups) -> None:
    """Overwrite ``tensors`` by those of the group's rank 0. All ranks must call this together, with the same list.

    Raises:
        FunctionError: The function returned something that cannot be waited for.
        PeerAbortedError: It has failed on another rank.
        CommunicationError: The default function failed to communicate, or a rank is gone.
    """
    try:
        with torch.no_grad():
            run(broadcasting(function, tensors, groups, sources=[0] * len(tensors)))
        groups.await_start()
    except BaseException as error:  # an interrupt, too
        instead = groups.fail(error, START)
        if instead is None:
            raise
        raise instead from error


def broadcasting(
    function: BroadcastFunction, tensors: Sequence[Tensor], groups: Groups, *, sources: Sequence[int]
) -> Steps:
    """:func:`broadcast_all` as steps, from any rank.

    ``sources`` has the rank of the group that sends each tensor, the same on every rank. ``function`` can only
    broadcast from rank 0; tensors of other ranks are broadcast by the default function.
    """
    used, source = function, 0
    try:
        pending = []
        for source, kind in _by_kind(tensors, sources):
            used = broadcast if source else function
            work = broadcast(kind, groups.buckets, source=source) if source else function(kind, groups.buckets)
            pending.append((used, source, work, kind[0].device))
        for message in pending:
            used, source, work, device = message
            if is_waitable(work):
                arriving = awaited_once(work, device)
                yield probe(arriving)
                title = f"broadcast_function {name_of(used)} (rank {groups.rank})"
                groups.failures.wait(arriving, device, partial(refuse_late, groups, title))
            elif work is not None:
                raise FunctionError(
                    f"rank {groups.rank}: broadcast_function returned {type(work).__name__}; it must change the "
                    "tensors in place and return None, or a Work or Future to wait for"
                )
    except Exception as error:
        if used is broadcast and isinstance(error, RuntimeError) and not isinstance(error, PeerAbortedError):
            raise CommunicationError(
                f"rank {groups.rank}: broadcasting from rank {source} failed: {error}. An error or a crash on "
                "another rank ends here: look for the first traceback of all ranks."
            ) from error
        annotate(error, f"in broadcast_function {name_of(used)} on rank {groups.rank}")
        raise


def _by_kind(tensors: Sequence[Tensor], sources: Sequence[int]) -> list[tuple[int, list[Tensor]]]:
    """Group tensors by source, dtype and device, in order of first occurrence; returns each group with its source."""
    kinds: dict[tuple[int, torch.dtype, torch.device], list[Tensor]] = {}
    for tensor, source in zip(tensors, sources, strict=True):
        local = local_tensor(tensor).detach()
        kinds.setdefault((source, local.dtype, local.device), []).append(local)
    return [(source, kind) for (source, _, _), kind in kinds.items()]


class BufferWrites:
    """Finds out which submodules' buffers this rank has written since they were last broadcast over ``parent``.

    A write in place shows in torch's version of a tensor; one through ``.data`` does not. All wrappers over groups of
    the same ranks share what is known of a submodule's buffers, so that what one of them broadcasts is no write for
    another. Nor is what arrives over a group of other ranks.
    """

    _tables: ClassVar[weakref.WeakKeyDictionary[ProcessGroup, _Table]] = weakref.WeakKeyDictionary()

    def __init__(self, parent: ProcessGroup) -> None:
        self._ranks = ranks_of(parent)
        tables = ((ranks_of(group), table) for group, table in list(self._tables.items()))
        twins = (table for ranks, table in tables if ranks and ranks == self._ranks)
        self._table = self._tables.setdefault(parent, next(twins, weakref.WeakKeyDictionary()))
        # By the name of a buffer: the name of its submodule, the submodule, its table of buffers, the buffer's own name
        # there, and what is known.
        self._slots: dict[str, tuple[str, nn.Module, dict[str, Tensor | None], str, _Known]] = {}
        # What is known elsewhere, the table of buffers, its key there, whether this rank had written the buffer, and
        # whether the broadcast brings it to all ranks of that group.
        self._lent: list[tuple[_Known, dict[str, Tensor | None], str, bool, bool]] = []

    def use_module(self, slots: Iterable[tuple[str, nn.Module, str]]) -> None:
        """Look at these buffers from now on: each a qualified name, a module, and the module's name for it.

        One that is new counts as the same on all ranks; known ones stay as they were noted.
        """
        self._slots = {
            name: (owner_of(name), owner, buffer_table(owner), key, self._table.setdefault(owner, {}))
            for name, owner, key in slots
        }
        for _, _, buffers, key, known in self._slots.values():
            if (buffer := buffers.get(key)) is not None:
                known.setdefault(key, (buffer, version_of(buffer)))

    def note(self, *, has_failed: bool = False) -> None:
        """Note that the buffers are the same on all ranks now; later writes count.

        If a broadcast ``has_failed``, what this rank has written is still to be sent over groups of other ranks.
        """
        for known, table, key, was_written, reaches_all in self._lent:
            buffer = table.get(key)
            if buffer is not None and key in known and known[key][0] is None:
                is_due = was_written and (has_failed or not reaches_all)
                known[key] = buffer, _WRITTEN if is_due else version_of(buffer)
        self._lent = []
        for _, _, buffers, key, known in self._slots.values():
            if (buffer := buffers.get(key)) is None:
                known.pop(key, None)
            else:
                known[key] = buffer, version_of(buffer)

    def release(self) -> None:
        """Drop all references to the buffers until :meth:`note`, as the broadcast counts references.

        What it writes into them meanwhile does not count.
        """
        for _, _, buffers, key, known in self._slots.values():
            known[key] = None, _WRITTEN if self._is_written(buffers.get(key), key, known) else _ARRIVING
        for group, table in [one for one in self._tables.items() if one[1] is not self._table]:
            reaches_all = self._ranks.issuperset(ranks_of(group) or {-1})
            for _, owner, buffers, key, _ in self._slots.values():
                other = table.get(owner, {})
                if other.get(key, (None,))[0] is not None:
                    was_written = self._is_written(buffers.get(key), key, other)
                    self._lent.append((other, buffers, key, was_written, reaches_all))
                    other[key] = None, other[key][1]

    @staticmethod
    def _is_written(buffer: Tensor | None, key: str, known: _Known) -> bool:
        if buffer is None:
            return False
        then, version = known.get(key, (None, _WRITTEN))
        if then is None or then is buffer or version in (_WRITTEN, _ARRIVING):
            return version not in (_ARRIVING, version_of(buffer))
        return version != version_of(then) or not _is_cast(then, buffer)

    def of(self, names: Iterable[str], *, marked: bool = False) -> list[bool]:
        """For each submodule with some of the buffers ``names``: whether one of them was written or replaced.

        With ``marked`` only what :meth:`mark` has marked counts.
        """
        is_writer: dict[str, bool] = {}
        for name in names:
            prefix, _, buffers, key, known = self._slots[name]
            if not is_writer.get(prefix):
                is_marked = key in known and known[key][1] == _WRITTEN
                is_writer[prefix] = is_marked or (not marked and self._is_written(buffers.get(key), key, known))
        return list(is_writer.values())

    def owners(self, names: Collection[str]) -> list[str]:
        """The names of the submodules whose buffers were written or replaced."""
        return [*compress(dict.fromkeys(map(owner_of, names)), self.of(names))]

    def mark(self, owners: Container[str]) -> None:
        """Mark the buffers of these submodules as written by this rank since the last broadcast."""
        for prefix, _, _, key, known in self._slots.values():
            if prefix in owners and key in known:
                known[key] = known[key][0], _WRITTEN


def _is_cast(then: Tensor, now: Tensor) -> bool:
    """Whether ``now`` has the values of ``then``, in the dtype or on the device to which the module was moved since."""
    is_other = then.dtype is not now.dtype or then.device != now.device
    return is_other and then.shape == now.shape and torch.equal(then.to(now), now)


_WRITTEN, _ARRIVING = -1, -2  # in place of a version: of a buffer that is marked, and of one that is being broadcast


def ranks_of(group: ProcessGroup) -> set[int]:
    """The global ranks of ``group``; none if it is unknown to torch, as one that was destroyed."""
    return set(dist.get_process_group_ranks(group)) if is_registered(group) else set()


def owner_of(name: str) -> str:
    """The name of the submodule that has the buffer ``name``."""
    return name.rpartition(".")[0]


def sources_of(names: Iterable[str], writers: Sequence[int]) -> list[int]:
    """The rank that sends each buffer; ``writers`` has the rank for each submodule, in order of first occurrence."""
    owners = [*map(owner_of, names)]
    by_owner = dict(zip(dict.fromkeys(owners), writers, strict=True))
    return [by_owner[owner] for owner in owners]


def broadcasting_buffers(
    function: BroadcastFunction, module_state: ModuleState, groups: Groups, *, sources: Sequence[int]
) -> Steps:
    """Broadcast the buffers of ``module_state``, as steps. All ranks must do this together.

    ``sources`` has the rank of the group that sends each buffer. Raises FunctionError as :func:`broadcast_all` does,
    and CommunicationError if the default function failed to communicate.
    """
    buffers = list(module_state.buffers().values())
    try:
        # Values that a graph may need are not overwritten; those of an expanded tensor cannot be. No loop variable: it
        # would count as a reference.
        gaps = [k for k, one in enumerate(buffers) if one.layout is torch.strided and not one.is_contiguous()]
        expanded = {k for k in gaps if is_expanded(local_tensor(buffers[k]))}
        received = [one.clone() if k in expanded or tensor_users(one) > 1 else one for k, one in enumerate(buffers)]
        yield from broadcasting(function, received, groups, sources=sources)
    except Exception as error:
        if unwritable := module_state.unwritable():  # since forward has assigned them
            annotate(error, f"while buffers were broadcast; {'; '.join(unwritable)}")
        raise
    needed = [k for k, values in enumerate(received) if values is not buffers[k]]
    for k in needed:
        if k in expanded or not torch.equal(*map(local_tensor, (buffers[k], received[k]))):
            _replace(buffers[k], received[k], module_state.places_of(buffers[k]), references=1)


def _replace(buffer: Tensor, values: Tensor, places: list[Place], *, references: int) -> None:
    """Replace ``buffer`` by ``values`` in the modules at ``places``, as a graph may need its values, or it is expanded.

    Each place is a module and its name for the buffer. ``references`` is the number of the caller's references to it.
    """
    is_free = _references(buffer) == len(places) + references + 1 and not _is_special(buffer)
    if is_free or is_expanded(local_tensor(buffer)):
        for owner, key in places:
            buffer_table(owner)[key] = values  # from now on only the graph has the old tensor
    elif all(only_writes_buffers(owner) for owner, _ in places):
        with preserve_versions([buffer]):
            buffer.copy_(values)
    else:
        buffer.copy_(values)  # a backward of the graph will raise, which is better than wrong gradients


def _references(buffer: Tensor) -> int:
    """The number of Python references to a tensor that a graph holds, including the caller's."""
    with torch.enable_grad():
        sample = torch.zeros((), dtype=torch.float32, device="cpu")
        _graph = torch.zeros((), requires_grad=True, device="cpu") * sample
    # The count may include a reference of torch's, depending on its version. The sample, held alike, cancels it out.
    return getrefcount(buffer) - getrefcount(sample)


def _is_special(buffer: Tensor) -> bool:
    """Whether a plain copy cannot replace it: it has attributes, or something else refers to it or its memory."""
    has_more = type(buffer) is not torch.Tensor or bool(buffer.__dict__) or buffer.requires_grad
    return storage_users(buffer) > 1 or has_more or weakref.getweakrefcount(buffer) > 0


_NAMED = 5  # tensors that a message names


def check_in_sync(negotiation: Negotiation, module_state: ModuleState, groups: Groups) -> None:
    """Compare the bits of the parameters of ``module_state``, and of its buffers if they are broadcast.

    It sends eight bytes a tensor. All ranks must call this together.

    Raises:
        DisagreementError: On every rank, with the same text; names the tensors that differ, and the ranks.
    """
    tensors: dict[str, Tensor] = dict(zip(module_state.names, module_state.parameters, strict=True))
    if negotiation.buffers():
        tensors.update(module_state.buffers())
    own = torch.tensor([digest_of(tensor) for tensor in tensors.values()], dtype=torch.int64, device="cpu")
    digests = [torch.empty_like(own) for _ in range(groups.world_size)]
    dist.all_gather(digests, own, group=groups.control)
    differing = [digest != digests[0] for digest in digests]
    ranks = [rank for rank, differs in enumerate(differing) if differs.any()]
    if not ranks:
        return
    anywhere = torch.stack(differing).any(dim=0).tolist()
    names = [name for name, differs in zip(tensors, anywhere, strict=True) if differs]
    raise DisagreementError(
        f"rank{'s' if ranks[1:] else ''} {', '.join(map(str, ranks))} and rank 0 have other values in {len(names)} of "
        f"{len(tensors)} parameters and buffers: {_some(names)}. Load a checkpoint on every rank, or on rank 0 before "
        "the module is wrapped, and change parameters on all ranks alike"
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:_NAMED])) + (f" and {len(names) - _NAMED} more" if names[_NAMED:] else "")


def digest_of(tensor: Tensor) -> int:
    """A 64-bit digest of all bits of the local tensor; of the sums of its rows and columns where it is large."""
    here = local_tensor(tensor).detach().contiguous()
    pieces, digest = [here], hashlib.blake2b(digest_size=8)
    if here.nbytes >= _SUMMED_BYTES and type(here) is torch.Tensor and not _is_lazy(here):
        flat = here.view(-1).view(torch.uint8)
        if flat.storage_offset() % 8:
            flat = flat.clone()
        # Six times as fast as the digest of all bytes. No single change, and no two, leave all of these sums the same.
        table = flat[: flat.numel() // _ROW_BYTES * _ROW_BYTES].view(torch.int64).view(-1, _ROW_BYTES // 8)
        pieces = [table.sum(0), table.sum(1), flat[table.nbytes :]]
    for piece in pieces:
        near = piece.cpu().contiguous()
        if near.nbytes:
            digest.update((ctypes.c_char * near.nbytes).from_address(near.data_ptr()))
    return int.from_bytes(digest.digest(), "little", signed=True)


def _is_lazy(tensor: Tensor) -> bool:
    return tensor.is_quantized or tensor.is_conj() or tensor.is_neg()


_SUMMED_BYTES, _ROW_BYTES = 1 << 16, 1 << 13  # from where on digests are of sums, and of how many bytes a row is
_PARTS, _EVERY = 11, 8
"""The parameters are compared in 11 parts, one in every 8th step. So each bit is compared within 100 steps."""
_LEAST_BYTES = 1 << 12  # of a part; a part of less than 8 times this size is cheap, and is compared more often
_STEP_BYTES = 4
NOT_DUE = bytes(2 * (_STEP_BYTES + 8))
"""The field of a rank that has nothing to compare."""
_CPU = torch.device("cpu")
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_ADDRESS = torch.Tensor.data_ptr


class DriftCheck:
    """Compares the parameters of all ranks, one part at a time; skips sparse ones and those of a subclass.

    With ``raises``, :meth:`conclude` raises a difference; else it is logged, on rank 0 and the ranks that differ.
    """

    def __init__(self, groups: Groups, module_state: ModuleState, *, raises: bool) -> None:
        self._groups, self.raises = groups, raises
        self._specs, self._parameters = module_state.specs, module_state.local_parameters()
        self._starts = [0, *accumulate(spec.nbytes for spec in self._specs)]
        self._part = max(_LEAST_BYTES, -(-self._starts[-1] // (8 * _PARTS)) * 8)
        self._parts = -(-self._starts[-1] // self._part) or 1
        self.every = min(_EVERY, self._part // _LEAST_BYTES)  # steps from one part to the next
        self._known: dict[int, tuple[list[nn.Parameter], list[int], list[Callable[[], Tensor]]]] = {}
        self._step = self._next = 0  # the steps of the last summed part and of the next one; 0 for none
        self._generation = groups.generation
        self._sums: list[Tensor] = []
        self._host = _prepared(self._parameters)
        self._arrivals: list[torch.Event] = []  # of sums that are sent to the host
        self._sent: list[int] | None = None
        self._equal = 0  # comparisons since the last difference
        self._reported: set[tuple[int, ...]] = set()
        self._error: DisagreementError | None = None

    def goes_on(self, module_state: ModuleState) -> bool:
        """Go on with a new listing of a module with equal parameters, as after freezing; returns whether they are."""
        if module_state.specs != self._specs:
            return False
        parameters = module_state.local_parameters()
        if not all(map(is_, parameters, self._parameters)):
            self._parameters = parameters
            self._known.clear()
            self._host = _prepared(parameters)
        return True

    def field(self, *, takes_part: bool) -> bytes:
        """The field of this rank's vote for the part that it has summed last; called in every :attr:`every`-th step.

        A rank that has run out of inputs (``join()``) has old parameters, and does not take part.
        """
        for arrival in self._arrivals:
            arrival.synchronize()
        sums = [*map(int, self._sums)]
        self._sent = sums if takes_part else None
        digest = hashlib.blake2b(repr(sums).encode(), digest_size=8).digest()
        field = with_complement(self._step.to_bytes(_STEP_BYTES, "big")) + with_complement(digest)
        generation, self._generation = self._generation, self._groups.generation
        # After a failed step of a DistributedOptimizer parameters are old in part, until a step succeeds.
        is_behind = generation != self._generation or any(gather.is_behind for gather in self._groups.gathers)
        self._step, self._sums, self._arrivals = 0, [], []
        self._next = self._groups.step % (1 << 8 * _STEP_BYTES) if takes_part and not is_behind else 0
        self._equal += 1
        if self._equal > self._parts:
            self._reported.clear()  # all parts have been the same since the last difference
        return field if takes_part else NOT_DUE

    def look(self) -> None:
        """Sum up the next part; called while the vote is in flight, when the host is idle, or after the last bucket."""
        if self._next:
            self._sums = self._add_up(self._next // self.every % self._parts)
            if self._host:
                self._arrivals = _sent_to_host(self._sums, self._host)
            self._step, self._next = self._next, 0

    def _add_up(self, part: int) -> list[Tensor]:
        """The sum of the bits of each piece of one part. On GPUs it is only launched here."""
        known = self._known.get(part)
        # Reading an address waits for a parameter that is being gathered.
        if known is None or list(map(_ADDRESS, known[0])) != known[1]:
            if known is not None:
                self._known.clear()  # it holds memory that the parameters have left
            pieces = [(self._parameters[i], self._specs[i], start, stop) for i, start, stop in self._pieces(part)]
            parameters = [parameter for parameter, *_ in pieces if _is_comparable(parameter)]
            known = self._known[part] = parameters, [*map(_ADDRESS, parameters)], [_adding_up(*one) for one in pieces]
        return [add_up() for add_up in known[2]]

    def _pieces(self, part: int) -> Sequence[tuple[int, int, int]]:
        """The pieces of a part: parameter index, first element, and one behind the last element, in memory order."""
        begin, end = part * self._part, (part + 1) * self._part
        pieces = []
        i = bisect_right(self._starts, begin) - 1
        while i < len(self._parameters) and self._starts[i] < end:
            size, numel = self._specs[i].dtype.itemsize, self._specs[i].numel
            unit = max(1, 8 // size)  # elements that are summed as one integer
            first, last = (min(-(-(at - self._starts[i]) // (size * unit)) * unit, numel) for at in (begin, end))
            if max(first, 0) < last:
                pieces.append((i, max(first, 0), last))
            i += 1
        return pieces

    def comparing(self, field: bytes) -> Steps:
        """Find and report the ranks that differ, if ``field``, the maxima of all ranks' fields, shows a difference."""
        if self.differs(field):
            yield from self._find_ranks(field)

    def differs(self, field: bytes) -> bool:
        """Whether some ranks have other bits, by the maxima of their fields; False if the fields are of other steps."""
        found = is_same(field[: 2 * _STEP_BYTES]) and not is_same(field[2 * _STEP_BYTES :])
        if found:
            self._equal = 0
        return found

    def _find_ranks(self, field: bytes) -> Steps:
        """Find the ranks and parameters that differ, and log them, or let :meth:`conclude` raise them. Collective.

        ``field`` has the maxima of the ranks' fields; a rank that does not take part calls this with the same maxima.
        """
        pieces = self._pieces(int.from_bytes(field[:_STEP_BYTES], "big") // self.every % self._parts)
        names = [self._specs[i].name for i, _, _ in pieces]
        rank, size = self._groups.rank, self._groups.world_size
        table = allocator(self._groups.control)(size * (len(names) + 1), torch.int64, _CPU).zero_().view(size, -1)
        if self._sent is not None:
            table[rank] = torch.tensor([1, *self._sent], device="cpu")
        yield from all_reduced(table, self._groups)
        rows = {other: row[1:] for other, row in enumerate(table.tolist()) if row[0]}
        found = _differing(rows, names)
        ranks = tuple(sorted({other for others in found.values() for other in others}))
        if not found or ranks in self._reported:
            return
        self._reported.add(ranks)
        text = _text(found, ranks, self._groups.step)
        if self.raises:
            self._error = None if self._sent is None else DisagreementError(text)  # without inputs nothing concludes it
        elif rank in (0, *ranks):
            logger.warning("rank %d: %s", rank, text)

    def conclude(self) -> None:
        """Raise a difference that was found, if ``raises`` is set; called when all averages are in ``.grad``."""
        error, self._error = self._error, None
        if error is not None:
            raise error


def _is_comparable(parameter: nn.Parameter) -> bool:
    if type(parameter) is PendingParameter:  # its own class is back after the wait
        wait_for(parameter)
    is_plain = type(parameter) in (nn.Parameter, torch.Tensor) and parameter.layout is torch.strided
    return is_plain and not parameter.is_meta and not parameter.is_quantized


def _prepared(parameters: Sequence[nn.Parameter]) -> dict[torch.device, Tensor]:
    """By device, pinned memory for the sums of one part.

    To allocate it, and to load the kernels that :meth:`DriftCheck.look` uses, waits for all calls on the device: for
    ever, if another rank has failed. So it is done here, where nothing is in flight.
    """
    host = {}
    for device in {one.device for one in parameters if not one.is_cpu and not one.is_meta}:
        sums = [torch.zeros(1, dtype=dtype, device=device).sum() for dtype in (torch.int64, *_INTEGERS.values())]
        host[device] = torch.empty(max(len(parameters), len(sums)), dtype=torch.int64, device="cpu", pin_memory=True)
        for count in (1, len(sums)):  # several scalars are stacked by another kernel than one
            for arrival in _sent_to_host(sums[:count], host):
                arrival.synchronize()
    return host


def _sent_to_host(scalars: list[Tensor], host: Mapping[torch.device, Tensor]) -> list[torch.Event]:
    """Replace the scalars of each device by a copy in ``host``, which is complete at the device's event."""
    arrivals = []
    for device in {scalar.device for scalar in scalars if not scalar.is_cpu}:
        places = [place for place, scalar in enumerate(scalars) if scalar.device == device]
        here = host[device][: len(places)].copy_(torch.stack([scalars[place] for place in places]), non_blocking=True)
        arrivals.append(torch.Event(device))
        arrivals[-1].record(torch.accelerator.current_stream(device))
        for place, number in zip(places, here.unbind(), strict=True):
            scalars[place] = number
    return arrivals


def _adding_up(parameter: nn.Parameter, spec: ParameterSpec, start: int, stop: int) -> Callable[[], Tensor]:
    """Return a function that sums these elements' bits as integers of 8 bytes; any flipped bit changes the sum."""
    if not _is_comparable(parameter):
        return torch.zeros((), dtype=torch.int64, device="cpu").sum

    def integers() -> Tensor:
        flat = flattened(parameter, spec)[start:stop]
        has_whole = not (flat.nbytes % 8 or flat.storage_offset() * flat.element_size() % 8)
        return flat.view(torch.int64 if has_whole else _INTEGERS[flat.element_size()])

    return integers().sum if is_dense(parameter, spec) else lambda: integers().sum()


def _differing(rows: Mapping[int, Sequence[int]], names: Sequence[str]) -> dict[str, list[int]]:
    """By parameter, the ranks that differ from the majority; all ranks if there is no majority."""
    found = {}
    for k, name in enumerate(names):
        values = {rank: row[k] for rank, row in rows.items()}
        (usual, count), *others = Counter(values.values()).most_common()
        if others:
            has_majority = 2 * count > len(values)
            found[name] = [rank for rank, value in values.items() if not has_majority or value != usual]
    return found


def _text(found: Mapping[str, Sequence[int]], ranks: Sequence[int], step: int) -> str:
    who = f"rank{'s' if ranks[1:] else ''} {', '.join(map(str, ranks))}"
    return (
        f"parameters have come to differ between the ranks: {who} in {_some(list(found))} (seen in step {step}; a part "
        "is compared at a time). One rank alone has stepped its optimizer, or loaded or assigned values, or its memory "
        "or arithmetic fails. check_in_sync() lists everything that differs; load a checkpoint on every rank to go on "
        "alike"
    )
