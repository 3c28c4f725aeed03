"""What is the same on every rank: parameters and buffers, which are broadcast, and compared.

A module's buffers are broadcast after backward. Where a rank does not use a submodule (a tower, an expert), its buffers
are as they were: those of a submodule come from the lowest rank that has written any of them since the last broadcast.

Forward writes buffers, and the ranks' values differ until they are broadcast; but a graph that is gone through again,
or another one that is still to be gone through, needs the values that it was made with. Which buffers a graph needs
may differ from rank to rank: every rank broadcasts the same list, with a copy in the place of such a buffer.

Parameters stay the same as long as all ranks change them alike. Whether they do is compared, a part in each step:

    every 8th synchronization    while its last messages are under way, an 11th of the parameters' memory is added up
                                 as integers, tensor by tensor
    the vote of the next such    carries a digest of the sums: 24 bytes, however many ranks there are
    where that differs           one more message, with the sums of all ranks, names ranks and parameters

Between a synchronization and the optimizer's step all ranks have the same parameters, whatever the optimizer is.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import weakref
from bisect import bisect_right
from collections import Counter
from itertools import accumulate, compress
from sys import getrefcount
from typing import TYPE_CHECKING

import torch
from torch import distributed as dist
from torch import nn

from ppe_ddp.contracts import is_waitable, probe
from ppe_ddp.engine.completion import run
from ppe_ddp.engine.failures import START, awaited_once
from ppe_ddp.engine.mask_exchange import is_same, with_complement
from ppe_ddp.engine.memory import allocator
from ppe_ddp.engine.module import local_tensor
from ppe_ddp.engine.negotiation import all_reduced
from ppe_ddp.engine.reduction import annotate
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

if TYPE_CHECKING:
    Place = tuple[nn.Module, str]
    from collections.abc import Callable, Container, Iterable, Mapping, Sequence

    from torch import Tensor

    from ppe_ddp.contracts import BroadcastFunction
    from ppe_ddp.engine.completion import Steps
    from ppe_ddp.engine.groups import Groups
    from ppe_ddp.engine.module import ModuleState
    from ppe_ddp.engine.negotiation import Negotiation
    from ppe_ddp.engine.plan import ParameterSpec

logger = logging.getLogger("ppe_ddp")


def broadcast_all(function: BroadcastFunction, tensors: Sequence[Tensor], groups: Groups) -> None:
    """Overwrite ``tensors`` by those of the group's rank 0, on all ranks. All must call this with the same list.

    Raises:
        FunctionError: The function returned something that cannot be waited for.
        PeerAbortedError: It has failed on another rank.
        CommunicationError: Our own function failed to communicate, or a rank is gone.
    """
    try:
        with torch.no_grad():
            run(broadcasting(function, tensors, groups, sources=[0] * len(tensors)))
        groups.await_start()
    except Exception as error:
        instead = groups.fail(error, START)
        if instead is None:
            raise
        raise instead from error


def broadcasting(
    function: BroadcastFunction, tensors: Sequence[Tensor], groups: Groups, *, sources: Sequence[int]
) -> Steps:
    """:func:`broadcast_all` as a generator that yields before it waits.

    ``sources`` has the rank of the group that sends each tensor, the same on every rank. ``function`` broadcasts what
    rank 0 sends; it knows no other source, for which our own does it.
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
                groups.failures.wait(arriving, device)
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
    """Tensors grouped by source, dtype and device, in the order in which the kinds come along; each with its source."""
    kinds: dict[tuple[int, torch.dtype, torch.device], list[Tensor]] = {}
    for tensor, source in zip(tensors, sources, strict=True):
        local = local_tensor(tensor).detach()
        kinds.setdefault((source, local.dtype, local.device), []).append(local)
    return [(source, kind) for (source, _, _), kind in kinds.items()]


class BufferWrites:
    """Finds out which submodules' buffers this rank has written since they were last broadcast.

    A write in place shows in torch's version of a tensor; one through ``.data`` does not.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[Tensor | None, int]] = {}

    def note(self, buffers: Mapping[str, Tensor]) -> None:
        """These are the same on all ranks now: what is written from here on counts."""
        self._known = {name: (buffer, _version(buffer)) for name, buffer in buffers.items()}

    def note_new(self, buffers: Mapping[str, Tensor]) -> None:
        """The module has these buffers now: note those that it did not have."""
        known = self._known
        self.note(buffers)
        self._known |= {name: known[name] for name in known.keys() & buffers.keys()}

    def release(self) -> None:
        """Let go of the buffers themselves, as a broadcast looks at who refers to them."""
        self._known = {name: (None, version) for name, (_, version) in self._known.items()}

    def of(self, buffers: Mapping[str, Tensor]) -> list[bool]:
        """Of each submodule that has some of ``buffers``, whether one was written or replaced."""
        is_writer = dict.fromkeys(map(owner_of, buffers), False)
        for name, buffer in buffers.items():
            known, version = self._known.get(name, (None, -1))
            if version != _version(buffer) or (known is not None and known is not buffer):
                is_writer[owner_of(name)] = True
        return list(is_writer.values())

    def owners(self, buffers: Mapping[str, Tensor]) -> list[str]:
        """The names of the submodules for which :meth:`of` says so."""
        return [*compress(dict.fromkeys(map(owner_of, buffers)), self.of(buffers))]

    def mark(self, owners: Container[str]) -> None:
        """This rank has written the buffers of these submodules since they were last broadcast."""
        marked = {name: (buffer, -1) for name, (buffer, _) in self._known.items() if owner_of(name) in owners}
        self._known |= marked


def owner_of(name: str) -> str:
    """The name of the submodule that has the buffer ``name``."""
    return name.rpartition(".")[0]


def sources_of(names: Iterable[str], writers: Sequence[int]) -> list[int]:
    """The rank that sends each buffer, by those that send each submodule's, in the order of the names."""
    owners = [*map(owner_of, names)]
    by_owner = dict(zip(dict.fromkeys(owners), writers, strict=True))
    return [by_owner[owner] for owner in owners]


def _version(buffer: Tensor) -> int:
    return 0 if buffer.is_inference() else version_of(buffer)


def broadcasting_buffers(
    function: BroadcastFunction, module_state: ModuleState, groups: Groups, *, sources: Sequence[int]
) -> Steps:
    """Give the buffers of ``module_state`` the values of other ranks, step by step. All ranks must do this together.

    ``sources`` are the ranks of the group whose values they get. Raises FunctionError as :func:`broadcast_all` does,
    and CommunicationError where our own function failed to communicate.
    """
    buffers = list(module_state.buffers().values())
    received = [buffer.clone() if tensor_users(buffer) > 1 else buffer for buffer in buffers]
    yield from broadcasting(function, received, groups, sources=sources)
    needed = [k for k, values in enumerate(received) if values is not buffers[k]]
    for k in needed:
        if not torch.equal(local_tensor(buffers[k]), local_tensor(received[k])):
            _replace(buffers[k], received[k], module_state.places_of(buffers[k]), references=1)


def _replace(buffer: Tensor, values: Tensor, places: list[Place], *, references: int) -> None:
    """Replace ``buffer``, whose values an autograd graph needs, by ``values`` in the modules at ``places``.

    Each place is a module with its name for the buffer; the caller has so many ``references`` to it.
    """
    if _references(buffer) == len(places) + references + 1 and not _is_special(buffer):
        for owner, key in places:
            buffer_table(owner)[key] = values  # only the graph has the old one from now on
    elif all(only_writes_buffers(owner) for owner, _ in places):
        with preserve_versions([buffer]):
            buffer.copy_(values)
    else:
        buffer.copy_(values)  # autograd refuses the graph by name; wrong numbers would be worse


def _references(buffer: Tensor) -> int:
    """The number of Python references to a tensor that torch holds, the caller's among them."""
    with torch.enable_grad():
        sample = torch.zeros(())
        _graph = torch.zeros((), requires_grad=True) * sample
    # Versions of torch differ in whether its own count as one. Both have one name here.
    return getrefcount(buffer) - getrefcount(sample)


def _is_special(buffer: Tensor) -> bool:
    """Whether a plain copy cannot replace it: it has more than values, or others refer to it or share its memory."""
    has_more = type(buffer) is not torch.Tensor or bool(buffer.__dict__) or buffer.requires_grad
    return storage_users(buffer) > 1 or has_more or weakref.getweakrefcount(buffer) > 0


_NAMED = 5  # of those that differ, in a message


def check_in_sync(negotiation: Negotiation, module_state: ModuleState, groups: Groups) -> None:
    """Compare the bits of the parameters of ``module_state``, and of its buffers where the ranks must agree on them.

    Eight bytes a tensor are sent. All ranks must call this together.

    Raises:
        DisagreementError: On every rank, with the same text; names what differs and on which ranks.
    """
    negotiation.check()  # else the messages might differ in length, of which gloo can end the process
    tensors: dict[str, Tensor] = dict(zip(module_state.names, module_state.parameters, strict=True))
    if negotiation.buffers():
        tensors.update(module_state.buffers())
    own = torch.tensor([digest_of(tensor) for tensor in tensors.values()], dtype=torch.int64)
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
    """A number of 64 bits that tells of a difference in any bit."""
    here = local_tensor(tensor).detach().cpu().contiguous()
    memory = (ctypes.c_char * here.nbytes).from_address(here.data_ptr()) if here.nbytes else b""
    return int.from_bytes(hashlib.blake2b(memory, digest_size=8).digest(), "little", signed=True)


_PARTS, _EVERY = 11, 8
"""In how many parts all parameters are compared, and a part in so many steps: with its digest, within 100 steps."""
_LEAST_BYTES = 1 << 12  # of a part; below 8 times as many it costs little, and there is one in more of the steps
_STEP_BYTES = 4
NOT_DUE = bytes(2 * (_STEP_BYTES + 8))
"""What a rank says that has nothing to compare."""
_CPU = torch.device("cpu")
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_ADDRESS = torch.Tensor.data_ptr


class DriftCheck:
    """Compares the parameters of all ranks, a part of them in each synchronization; not those of a subclass, or sparse.

    If it ``raises``, :meth:`conclude` raises what was found; else it is logged, on rank 0 and the ranks concerned.
    """

    def __init__(self, groups: Groups, module_state: ModuleState, *, raises: bool) -> None:
        self._groups, self.raises = groups, raises
        self._specs, self._parameters = module_state.specs, module_state.local_parameters()
        self._starts = [0, *accumulate(spec.nbytes for spec in self._specs)]
        self._part = max(_LEAST_BYTES, -(-self._starts[-1] // (8 * _PARTS)) * 8)
        self._parts = -(-self._starts[-1] // self._part) or 1
        self.every = min(_EVERY, self._part // _LEAST_BYTES)  # a part is looked at, and compared, in so many steps
        self._known: dict[int, tuple[list[nn.Parameter], list[int], list[Callable[[], Tensor]]]] = {}
        self._step = self._next = 0  # of the part that was added up last, and of the one to come; 0 for none
        self._generation = groups.generation
        self._sums: list[Tensor] = []
        self._sent: list[int] | None = None
        self._equal = 0  # how many comparisons there were since one has found something
        self._reported: set[tuple[int, ...]] = set()
        self._error: DisagreementError | None = None

    def field(self, *, takes_part: bool) -> bytes:
        """What this rank says in a vote of the part that it has seen last; in the steps of :attr:`every`.

        It ``takes_part`` if it has the same parameters as the others, which a rank that has joined has not.
        """
        sums = [*map(int, self._sums)]
        self._sent = sums if takes_part else None
        digest = hashlib.blake2b(repr(sums).encode(), digest_size=8).digest()
        field = with_complement(self._step.to_bytes(_STEP_BYTES, "big")) + with_complement(digest)
        generation, self._generation = self._generation, self._groups.generation
        # A distributed optimizer's step that has failed leaves parts of parameters behind, until one that succeeds.
        is_behind = generation != self._generation or any(gather.is_behind for gather in self._groups.gathers)
        self._step, self._sums = 0, []
        self._next = self._groups.step % (1 << 8 * _STEP_BYTES) if takes_part and not is_behind else 0
        self._equal += 1
        if self._equal > self._parts:
            self._reported.clear()  # all have been the same since
        return field if takes_part else NOT_DUE

    def look(self) -> None:
        """Look at the next part, once the vote is under way: the host has nothing else to do then."""
        if self._next:
            self._sums = self._add_up(self._next // self.every % self._parts)
            self._step, self._next = self._next, 0

    def _add_up(self, part: int) -> list[Tensor]:
        """The sums of the bits of each piece of one part. On GPUs they are only launched, and read with the next."""
        known = self._known.get(part)
        # To ask for its address waits for a parameter that is being gathered.
        if known is None or list(map(_ADDRESS, known[0])) != known[1]:
            if known is not None:
                self._known.clear()  # which keeps memory that parameters do not have any more
            pieces = [(self._parameters[i], self._specs[i], start, stop) for i, start, stop in self._pieces(part)]
            parameters = [parameter for parameter, *_ in pieces if _is_comparable(parameter)]
            known = self._known[part] = parameters, [*map(_ADDRESS, parameters)], [_adding_up(*one) for one in pieces]
        return [add_up() for add_up in known[2]]

    def _pieces(self, part: int) -> Sequence[tuple[int, int, int]]:
        """What belongs to a part: parameters by index, each with its first and last element in memory."""
        begin, end = part * self._part, (part + 1) * self._part
        pieces = []
        i = bisect_right(self._starts, begin) - 1
        while i < len(self._parameters) and self._starts[i] < end:
            size, numel = self._specs[i].dtype.itemsize, self._specs[i].numel
            unit = max(1, 8 // size)  # elements that are added up as one integer
            first, last = (min(-(-(at - self._starts[i]) // (size * unit)) * unit, numel) for at in (begin, end))
            if max(first, 0) < last:
                pieces.append((i, max(first, 0), last))
            i += 1
        return pieces

    def comparing(self, field: bytes) -> Steps:
        """Name the ranks that differ, if ``field``, the maxima of all ranks' fields, tells of a difference."""
        if self.differs(field):
            yield from self._find_ranks(field)

    def differs(self, field: bytes) -> bool:
        """Whether some ranks have other bits, by the maxima of their fields; not where they speak of other steps."""
        found = is_same(field[: 2 * _STEP_BYTES]) and not is_same(field[2 * _STEP_BYTES :])
        if found:
            self._equal = 0
        return found

    def _find_ranks(self, field: bytes) -> Steps:
        """Find out which ranks differ and in what, and log it, or have :meth:`conclude` raise it; on all ranks.

        ``field`` has the maxima of the ranks' fields, which also those have that take no part.
        """
        pieces = self._pieces(int.from_bytes(field[:_STEP_BYTES], "big") // self.every % self._parts)
        names = [self._specs[i].name for i, _, _ in pieces]
        rank, size = self._groups.rank, self._groups.world_size
        table = allocator(self._groups.control)(size * (len(names) + 1), torch.int64, _CPU).zero_().view(size, -1)
        if self._sent is not None:
            table[rank] = torch.tensor([1, *self._sent])
        yield from all_reduced(table, self._groups)
        rows = {other: row[1:] for other, row in enumerate(table.tolist()) if row[0]}
        found = _differing(rows, names)
        ranks = tuple(sorted({other for others in found.values() for other in others}))
        if not found or ranks in self._reported:
            return
        self._reported.add(ranks)
        text = _text(found, ranks, self._groups.step)
        if self.raises:
            self._error = DisagreementError(text)
        elif rank in (0, *ranks):
            logger.warning("rank %d: %s", rank, text)

    def conclude(self) -> None:
        """Raise what was found, if that is wanted: all averages are in ``.grad``."""
        error, self._error = self._error, None
        if error is not None:
            raise error


def _is_comparable(parameter: nn.Parameter) -> bool:
    if type(parameter) is PendingParameter:  # until it has come, on each rank at another time
        wait_for(parameter)
    is_plain = type(parameter) in (nn.Parameter, torch.Tensor) and parameter.layout is torch.strided
    return is_plain and not parameter.is_meta and not parameter.is_quantized


def _adding_up(parameter: nn.Parameter, spec: ParameterSpec, start: int, stop: int) -> Callable[[], Tensor]:
    """Adds up these elements' bits, which every flipped bit changes: of 8 bytes at a time, which is quick."""
    if not _is_comparable(parameter):
        return torch.zeros((), dtype=torch.int64).sum

    def integers() -> Tensor:
        flat = flattened(parameter, spec)[start:stop]
        has_whole = not (flat.nbytes % 8 or flat.storage_offset() * flat.element_size() % 8)
        return flat.view(torch.int64 if has_whole else _INTEGERS[flat.element_size()])

    return integers().sum if is_dense(parameter, spec) else lambda: integers().sum()


def _differing(rows: Mapping[int, Sequence[int]], names: Sequence[str]) -> dict[str, list[int]]:
    """By parameter, the ranks that differ from most; all of them where none is in the majority."""
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
