"""The conformance kit on one rank: calls with known results, and training of a dynamic model.

The calls show which promise is broken; training shows only that one is. The model's graph differs on each rank and in
each step. Each rank also takes the steps of all ranks on copies of the module, without communication, so it knows the
mean. A rank goes on after an error, so that no other waits for it. The process that has started the ranks compares
their results, as the transport may be what is tested.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from ppe_ddp.backends.group_internals import default_group
from ppe_ddp.contracts import BroadcastFunction, CommHook, GradBucket, ReduceFunction, is_waitable
from ppe_ddp.ddp import DistributedDataParallel
from ppe_ddp.engine.groups import Groups
from ppe_ddp.engine.reduction import FunctionReduction, HookReduction, Reduction
from ppe_ddp.functions import average, broadcast

_WIDTH, _ROWS, _EMBEDDED = 5, 2, 6
# Rounding errors of the sum over ranks, of a second round, and of adding to what was in .grad.
_ROUNDINGS = 16
# Options of the wrapper that must not change a result.
_VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"gradient_as_bucket_view": False, "bucket_cap_mb": 0.0002},
    {"overlap": False, "bucket_cap_mb": 0.0002},
)
_Shape = tuple[int, ...]
_BUCKETS: tuple[tuple[_Shape, ...], ...] = (((5,),), ((3, 4), (0, 2), (), (7,)), ((1,),), ((12,),), ((1 << 16,), (33,)))
_EXTREME = 3  # the bucket with NaN, infinity, large and small numbers
_GUARD = 16
_SIZES = (1, 5, 100_003)
_MODULUS = 5


@dataclass(frozen=True)
class Plugs:
    """The functions and hooks that are plugged into the wrapper."""

    reduce_function: ReduceFunction | None = None
    broadcast_function: BroadcastFunction | None = None
    hook: CommHook | None = None
    state: object = None  # the hook's; each wrapper gets a deep copy
    # The largest error of a mean, in units of the model's largest gradient element on any rank; None for rounding.
    tolerance: float | None = None


# ---------------------------------------------------------------------- functions and hooks


def probe_reduction(plugs: Plugs, dtypes: Sequence[torch.dtype], device: str) -> list[str]:
    """Pass known buckets of these dtypes to a reduce function or hook, several in flight at a time.

    A function is also called in groups of rank 0 alone and of all others; a hook is not, as it is given no group.
    """
    problems: list[str] = []
    for group in _groups(split=plugs.hook is None):
        groups = Groups.duplicate(group, shared_memory=True)
        reduction = _reduction(plugs, groups)
        for dtype in dtypes:
            problems.extend(_reduced(reduction, groups, dtype, device, plugs.tolerance))
    return problems


def _reduction(plugs: Plugs, groups: Groups) -> Reduction:
    if plugs.hook is not None:
        return HookReduction(copy.deepcopy(plugs.state), plugs.hook, groups)
    function = plugs.reduce_function or average
    # By what it declares, the engine would not call our own function; here it must be called.
    return FunctionReduction(functools.partial(average) if function is average else function, groups)


def _groups(*, split: bool) -> Iterator[ProcessGroup]:
    """The group of all ranks; if ``split``, also that of rank 0 alone or of all others."""
    yield default_group()
    if split and dist.get_world_size() > 2:
        others = list(range(1, dist.get_world_size()))
        yield dist.new_group([0] if dist.get_rank() == 0 else others, use_local_synchronization=True)


def _reduced(
    reduction: Reduction, groups: Groups, dtype: torch.dtype, device: str, tolerance: float | None
) -> Iterator[str]:
    is_divided = reduction.takes_divided(torch.device(device))
    asked = [_KnownBucket(k, groups, dtype, device, is_divided, tolerance) for k in range(len(_BUCKETS))]
    seed = torch.initial_seed()
    with torch.no_grad():
        for together in [[one] for one in asked] if reduction.one_at_a_time else [asked]:
            pending = [reduction.start(question.bucket) for question in together]
            for question, work in zip(together, pending, strict=True):
                reduction.finish(question.bucket, work, question.memory)
    members = dist.get_process_group_ranks(groups.parent)
    where = f"a bucket of {dtype} over ranks {members}"
    if len(members) < dist.get_world_size():
        where += " (does it use the group that it is given?)"
    if torch.initial_seed() != seed:
        yield f"{where}: the random state of the program has been seeded; use a torch.Generator of your own"
    for question in asked:
        yield from (f"{where}: {problem}" for problem in question.problems())


class _KnownBucket:
    """A bucket whose mean is known, in memory with guard elements before and after it."""

    def __init__(
        self, index: int, groups: Groups, dtype: torch.dtype, device: str, is_divided: bool, tolerance: float | None
    ) -> None:
        shapes = _BUCKETS[index]
        sizes = [math.prod(shape) for shape in shapes]
        count = sum(sizes)
        members = dist.get_process_group_ranks(groups.parent)
        shares = torch.stack([_numbers(count, dtype, index, rank) for rank in members])
        if index == _EXTREME and tolerance is None:  # compression need not keep these
            _make_extreme(shares)
        self._mean = shares.double().mean(0)
        self._allowed = _allowed(shares.double().abs(), self._mean, tolerance, _ROUNDINGS * torch.finfo(dtype).eps)
        self._guarded = torch.full((count + 2 * _GUARD,), 77.0, dtype=dtype, device=device)
        self._flat = self._guarded[_GUARD : _GUARD + count]
        self._flat.copy_(shares[groups.rank])
        if is_divided:
            self._flat.mul_(1.0 / groups.world_size)
        starts = [0, *itertools.accumulate(sizes)]
        # Matrices have the strides of a transposed one, as gradients have in torch.channels_last.
        self.memory = [
            self._flat[start : start + size].view(shape[::-1]).t()
            for start, size, shape in zip(starts, sizes, shapes, strict=False)
        ]
        self._parameters = [nn.Parameter(torch.full_like(view, 3.0)) for view in self.memory]
        self.bucket = GradBucket(
            [view.detach() for view in self.memory],
            buffer=self._flat.detach(),
            parameters=self._parameters,
            names=tuple(f"bucket{index}.{k}" for k in range(len(shapes))),
            index=index,
            is_last=index == len(_BUCKETS) - 1,
            is_divided=is_divided,
        )

    def problems(self) -> Iterator[str]:
        """The errors in the result, as sentences."""
        result = self.bucket.buffer().detach().reshape(-1).double().cpu()
        errors = (result - self._mean).abs()
        is_right = (errors <= self._allowed) | (result == self._mean) | (result.isnan() & self._mean.isnan())
        offset = 0
        for name, gradient in zip(self.bucket.names(), self.memory, strict=True):
            wrong = [offset + int(k) for k in (~is_right[offset : offset + gradient.numel()]).nonzero()]
            offset += gradient.numel()
            if wrong and self._mean[wrong].isfinite().all():
                k = max(wrong, key=lambda k: float(errors[k].nan_to_num(math.inf)))
                yield f"{name} is off the mean by {errors[k]:.3g}, where {self._allowed[k]:.3g} is allowed"
            elif wrong:
                yield f"{name} has {result[wrong].tolist()}, where the mean is {self._mean[wrong].tolist()}"
        if not ((self._guarded[:_GUARD] == 77).all() and (self._guarded[-_GUARD:] == 77).all()):
            yield f"memory outside of bucket {self.bucket.index()} was written to"
        if not all((parameter == 3).all() for parameter in self._parameters):
            yield f"parameters of bucket {self.bucket.index()} were changed; only gradients may be"


def _make_extreme(shares: Tensor) -> None:
    """Let one rank have NaN, another one infinity, and all ranks large and small numbers."""
    large = torch.finfo(shares.dtype).max ** 0.25
    shares[0, 0], shares[-1, 1] = math.nan, math.inf
    shares[:, 2:7] *= large
    shares[:, 7:] /= large


def _allowed(sizes: Tensor, mean: Tensor, tolerance: float | None, rounding: float) -> Tensor:
    """The error that is allowed for each element, from its absolute values on all ranks."""
    if tolerance is not None:
        return torch.full_like(mean, tolerance * float(mean.abs().max()))
    return torch.where(mean.isfinite(), rounding * sizes.amax(0), 0.0)


def _numbers(count: int, dtype: torch.dtype, *seeds: int) -> Tensor:
    """Random numbers that follow from the seeds, so that a rank can make those of the others."""
    seed = sum(value * 1009**k for k, value in enumerate(seeds))
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=generator, dtype=torch.float64, device="cpu").to(dtype)


def probe_broadcast(plugs: Plugs, dtypes: Sequence[torch.dtype], device: str) -> list[str]:
    """Let a broadcast function copy known tensors of these dtypes, in a group of all ranks and in parts of it."""
    function = plugs.broadcast_function or broadcast
    problems: list[str] = []
    for group in _groups(split=True):
        members = dist.get_process_group_ranks(group)
        for dtype in dtypes:
            tensors = _assorted(dtype, device, dist.get_rank())
            wanted = _assorted(dtype, device, members[0])
            with torch.no_grad():
                work = function(tensors, group)
                if is_waitable(work):
                    work.wait()
                elif work is not None:
                    problems.append(f"it returned {type(work).__name__}, not None, a Work or a Future")
            wrong = [
                f"{tuple(tensor.shape)} (strides {tensor.stride()})"
                for tensor, want in zip(tensors, wanted, strict=True)
                if not torch.equal(tensor, want)
            ]
            if wrong:
                problems.append(
                    f"tensors of {dtype} over ranks {members}: those of shape {', '.join(wrong)} are not those of the "
                    "group's rank 0"
                )
    return problems


def _assorted(dtype: torch.dtype, device: str, rank: int) -> list[Tensor]:
    numbers = [_numbers(math.prod(shape), torch.float64, k, rank) for k, shape in enumerate(_BUCKETS[1])]
    plain = [(number * 8).view(shape) for number, shape in zip(numbers, _BUCKETS[1], strict=True)]
    plain.append((_numbers(12, torch.float64, 9, rank) * 8).view(3, 4).t())
    # Platforms convert negative numbers to unsigned ones in different ways.
    return [(tensor if dtype.is_signed else tensor.abs()).to(dtype).to(device) for tensor in plain]


# ---------------------------------------------------------------------- backends


def probe_backend(device: str) -> list[str]:
    """Call each operation that the engine uses on the default process group; all ranks must call this together.

    Rank 0 says on stderr which operations are lacking that only parts of the library need; they are no problems.
    """
    probes = (_all_reduce, _in_flight, _copies, _objects, _subgroup, _of_parts)
    return [problem for probe in probes for problem in probe(device)]


def _integers(size: int, dtype: torch.dtype, device: str, rank: int | None = None) -> Tensor:
    """Small integers, whose sums are exact in every dtype; different on every rank."""
    rank = dist.get_rank() if rank is None else rank
    return ((torch.arange(size, device="cpu") + 2 * rank) % _MODULUS + rank).to(dtype).to(device)


def _everyone(size: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.stack([_integers(size, dtype, device, rank) for rank in range(dist.get_world_size())])


def _sum(tensor: Tensor, ranks: Sequence[int] | None = None) -> Tensor:
    everyone = _everyone(tensor.numel(), torch.float64, tensor.device.type)
    return (everyone if ranks is None else everyone[list(ranks)]).sum(0).to(tensor.dtype)


def _all_reduce(device: str) -> Iterator[str]:
    floating = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    kinds = [("MAX", torch.uint8), ("MAX", torch.int64), ("SUM", torch.int64), *(("SUM", dtype) for dtype in floating)]
    for (name, dtype), size, is_async in itertools.product(kinds, _SIZES, (False, True)):
        tensor = _integers(size, dtype, device)
        work = dist.all_reduce(tensor, getattr(dist.ReduceOp, name), async_op=is_async)
        if is_async:
            work.wait()
        if not torch.equal(tensor, _everyone(size, dtype, device).amax(0) if name == "MAX" else _sum(tensor)):
            yield f"all_reduce({name}) of {size} {dtype}, async_op={is_async}, is wrong"


def _in_flight(device: str) -> Iterator[str]:
    """Start several all-reduces at once in two groups; check ``is_completed()``, ``wait()`` and ``get_future()``."""
    tensors = [_integers(size, torch.float32, device) for size in (*_SIZES, 2)]
    groups = [dist.new_group(list(range(dist.get_world_size())), use_local_synchronization=True) for _ in range(2)]
    works = [dist.all_reduce(tensor, group=groups[k % 2], async_op=True) for k, tensor in enumerate(tensors)]
    for tensor, work in reversed(list(zip(tensors, works, strict=True))):
        if not isinstance(work.is_completed(), bool):
            yield "Work.is_completed() does not return a bool"
        work.wait()
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)  # wait() has only made the stream wait
        if not work.is_completed():
            yield "Work.is_completed() is False after wait()"
        if not torch.equal(tensor, _sum(tensor)):
            yield "of several all_reduces in flight, in two groups at a time, one is wrong"
    tensor = _integers(5, torch.float32, device)
    future = dist.all_reduce(tensor, async_op=True).get_future().then(lambda done: done.value()[0] * 2)
    if not torch.equal(future.wait(), 2 * _sum(tensor)):
        yield "Work.get_future() does not hold a list of the reduced tensor"


def _copies(device: str) -> Iterator[str]:
    world = range(dist.get_world_size())
    for dtype, size, source in itertools.product((torch.uint8, torch.float32, torch.int64), _SIZES, world):
        tensor = _integers(size, dtype, device)
        dist.broadcast(tensor, group_src=source, async_op=True).wait()
        if not torch.equal(tensor, _integers(size, dtype, device, source)):
            yield f"broadcast of {size} {dtype} from rank {source} is wrong"
    for dtype, size in itertools.product((torch.int64, torch.float32, torch.bfloat16), _SIZES):
        parts = [torch.zeros(size, dtype=dtype, device=device) for _ in world]
        dist.all_gather(parts, _integers(size, dtype, device))
        if not torch.equal(torch.stack(parts), _everyone(size, dtype, device)):
            yield f"all_gather of {size} {dtype} is wrong"


def _objects(device: str) -> Iterator[str]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    found: list[object] = [None] * world_size
    dist.all_gather_object(found, {"rank": rank, "text": "x" * 1000 * rank})
    if found != [{"rank": k, "text": "x" * 1000 * k} for k in range(world_size)]:
        yield f"all_gather_object (on {device}) of objects of different sizes is wrong"
    dist.barrier(device_ids=[torch.cuda.current_device()] if device.startswith("cuda") else None)


def _subgroup(device: str) -> Iterator[str]:
    """Make a group of all ranks but 0 on these ranks alone, and call collectives in it."""
    members = list(range(1, dist.get_world_size()))
    if dist.get_rank() not in members:
        # torch names groups by counting them, so that every rank must have as many.
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
        return
    group = dist.new_group(members, use_local_synchronization=True)
    if dist.get_world_size(group) != len(members) or dist.get_rank(group) != dist.get_rank() - 1:
        yield f"new_group({members}, use_local_synchronization=True) has other ranks than it was asked for"
    tensor = _integers(5, torch.float32, device)
    wanted = _sum(tensor, members)
    dist.all_reduce(tensor, group=group)
    if not torch.equal(tensor, wanted):
        yield f"all_reduce in a group of ranks {members} is wrong"
    dist.broadcast(tensor, group=group, group_src=len(members) - 1)
    if not torch.equal(tensor, wanted):
        yield f"broadcast in a group of ranks {members} is wrong"


def _of_parts(device: str) -> Iterator[str]:
    """Call what only sharded optimizers and compressors need: a backend may lack it, but must not do it wrongly."""
    rank, size, users = dist.get_rank(), dist.get_world_size(), "DistributedOptimizer and compressors"
    for count in _SIZES:
        everyone = _everyone(count * size, torch.float32, device)
        parts, columns = everyone.view(size, size, count), slice(rank * count, (rank + 1) * count)
        yield from _of_part("all_gather_into_tensor", users, parts[:, 0].reshape(-1), parts[rank, 0])
        yield from _of_part("reduce_scatter_tensor", "DistributedOptimizer", everyone.sum(0)[columns], everyone[rank])
        yield from _of_part("all_to_all_single", users, parts[:, rank].reshape(-1), everyone[rank])


def _of_part(name: str, users: str, wanted: Tensor, sent: Tensor) -> Iterator[str]:
    received = torch.zeros_like(wanted)
    newer = name.replace("into_tensor", "single").replace("tensor", "single")
    function = getattr(dist, newer, None) or getattr(dist, name)
    try:
        function(received, sent.contiguous(), async_op=True).wait()
    except (NotImplementedError, RuntimeError) as error:
        if dist.get_rank() == 0 and sent.numel() <= dist.get_world_size():  # said once, for the smallest size
            print(f"the backend has no {name}, needed for {users}: {error}", file=sys.stderr, flush=True)
        return
    if not torch.equal(received, wanted):
        yield f"{name} of {sent.numel()} {sent.dtype} is wrong, for {users}"


# ---------------------------------------------------------------------- training


class Trained(NamedTuple):
    """The findings of one rank."""

    problems: list[str]  # as sentences
    digests: dict[str, str]  # of gradients and buffers, by step and name; they must be equal on all ranks


class _LinearOfDtype(nn.Module):
    """A linear map in its own dtype, of activations in float32."""

    def __init__(self, dtype: torch.dtype, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn((_WIDTH, _WIDTH), generator=generator, device="cpu").div(2).to(dtype))
        self.bias = nn.Parameter(torch.zeros(_WIDTH, dtype=dtype, device="cpu"))

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh((hidden.to(self.weight.dtype) @ self.weight + self.bias).float())


class DynamicModel(nn.Module):
    """Layers, some of which each forward chooses at random.

    The layers have ``dtypes`` in turn; with ``has_sparse`` there is an embedding with sparse gradients.
    """

    seen: Tensor

    def __init__(self, dtypes: Sequence[torch.dtype], *, has_sparse: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        maps = [_LinearOfDtype(dtypes[k % len(dtypes)], generator) for k in range(9)]
        self.first, self.recomputed, self.unused = maps[:3]
        self.branches, self.heads = nn.ModuleList(maps[3:6]), nn.ModuleList(maps[6:8])
        self.frozen = maps[8].requires_grad_(False)
        # Its gradient has other strides than a contiguous one, as in torch.channels_last.
        self.first.weight = nn.Parameter(self.first.weight.detach().t())
        self.empty = nn.Parameter(torch.zeros((0, _WIDTH), dtype=dtypes[0], device="cpu"))
        self.factor = nn.Parameter(torch.ones((), dtype=dtypes[-1], device="cpu"))
        table = torch.randn((_EMBEDDED, _WIDTH), generator=generator, device="cpu")
        self.rows = nn.Embedding(_EMBEDDED, _WIDTH, sparse=True, _weight=table) if has_sparse else None
        self.register_buffer("seen", torch.zeros(_WIDTH, dtype=torch.float64, device="cpu"))

    def forward(self, batch: Tensor, draw: Random) -> list[Tensor]:
        """The outputs of one head or of both, for a batch of shape (rows, width)."""
        with torch.no_grad():
            self.seen += batch.sum(0)
        hidden = self.first(batch) + self.empty.sum(0).float()
        if self.rows is not None and draw.random() < 0.5:
            hidden = hidden + self.rows(torch.tensor([draw.randrange(_EMBEDDED), 0], device=batch.device))
        if draw.random() < 0.5:  # stochastic depth
            hidden = checkpoint(self.recomputed, hidden, use_reentrant=False)
        if draw.random() < 0.7:  # an early exit
            hidden = self.first(self.frozen(self.branches[draw.randrange(3)](hidden))) * self.factor.float()
        hidden = hidden.detach() if draw.random() < 0.2 else hidden
        return [self.heads[k](hidden) for k in draw.sample(range(2), draw.randint(1, 2))]


class _Actor(NamedTuple):
    """One rank in one step, which trains the wrapper or a copy of the module."""

    model: Callable[..., list[Tensor]]
    number: int
    rank: int
    is_absent: bool
    device: str

    def losses(self, forward: int = 0) -> list[Tensor]:
        seed = f"{self.number} {self.rank} {forward}"
        generator = torch.Generator().manual_seed(Random(seed).getrandbits(60))
        batch = torch.randn(_ROWS, _WIDTH, generator=generator, device="cpu").to(self.device).requires_grad_()
        return [(output + 0.5).square().mean() for output in self.model(batch, Random(f"path {seed}"))]

    def loss(self, forward: int = 0) -> Tensor:
        return torch.stack(self.losses(forward)).sum()


# ---------------------------------------------------------------------- steps, which stop after each synchronization


def _one_backward(actor: _Actor) -> Iterator[None]:
    actor.loss().backward()
    yield


def _micro_batches(actor: _Actor) -> Iterator[None]:
    with actor.model.no_sync() if isinstance(actor.model, DistributedDataParallel) else contextlib.nullcontext():
        actor.loss(1).backward()
    actor.loss().backward()
    yield


def _absent(actor: _Actor) -> Iterator[None]:
    if not actor.is_absent:
        actor.loss().backward()
    elif isinstance(actor.model, DistributedDataParallel):
        actor.model.finish_grad_sync()
    yield


def _two_backwards(actor: _Actor) -> Iterator[None]:
    for forward in (0, 1):
        actor.loss(forward).backward()
        yield


def _two_forwards(actor: _Actor) -> Iterator[None]:
    (actor.loss() + 2 * actor.loss(1)).backward()
    yield


def _two_losses(actor: _Actor) -> Iterator[None]:
    first, *others = actor.losses()
    first.backward(retain_graph=True)
    yield
    (torch.stack(others).sum() if others else first * 0.5).backward()
    yield


# Each with how gradients are cleared before: True to None, False to zero, None not at all.
_STEPS: tuple[tuple[Callable[[_Actor], Iterator[None]], bool | None], ...] = (
    (_one_backward, True),
    (_micro_batches, False),
    (_absent, True),
    (_two_backwards, None),
    (_two_forwards, True),
    (_two_losses, False),
    (_one_backward, True),
)


def train(plugs: Plugs, dtypes: Sequence[torch.dtype], device: str, *, has_sparse: bool = False) -> Trained:
    """Take all kinds of steps with each variant of options; all ranks of the default group call this together."""
    trained = Trained([], {})
    for options in _VARIANTS:
        _WrapperOnTrial(plugs, options, DynamicModel(dtypes, has_sparse=has_sparse).to(device), device, trained).run()
    return trained


class _WrapperOnTrial:
    """A wrapper with some plugs and options; adds to ``found`` what is wrong in its steps."""

    def __init__(
        self, plugs: Plugs, options: dict[str, Any], module: DynamicModel, device: str, found: Trained
    ) -> None:
        self._module, self._device, self._found, self._plugs = module, device, found, plugs
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._name = ", ".join(f"{name}={value}" for name, value in options.items()) or "default options"
        start = copy.deepcopy(module.state_dict())
        if self._rank != 0:
            with torch.no_grad():  # wrapping must overwrite them by rank 0's
                for tensor in (*module.parameters(), *module.buffers()):
                    tensor.fill_(self._rank)
        functions: dict[str, Any] = {
            "reduce_function": plugs.reduce_function,
            "broadcast_function": plugs.broadcast_function,
        }
        self._wrapper = DistributedDataParallel(module, **functions, **options)
        if plugs.hook is not None:
            self._wrapper.register_comm_hook(copy.deepcopy(plugs.state), plugs.hook)
        wrong = [name for name, tensor in module.state_dict().items() if not torch.equal(tensor, start[name])]
        if wrong:
            found.problems.append(f"training ({self._name}): after wrapping, {', '.join(wrong)} should be rank 0's")

    def run(self) -> None:
        copies = [copy.deepcopy(self._module) for _ in range(self._size)]
        for number, (step, set_to_none) in enumerate(_STEPS):
            for twin in copies:
                self._bring_here(twin)
            actors = [self._actor(twin, number, rank) for rank, twin in enumerate(copies)]
            if set_to_none is not None:
                for model in (self._wrapper, *copies):
                    model.zero_grad(set_to_none)
            expected = [_average(copies) for _ in zip(*map(step, actors), strict=True)]
            own = step(self._actor(self._wrapper, number, self._rank))
            for k, (means, _) in enumerate(zip(expected, own, strict=True)):
                when = f"training ({self._name}), step {number} ({step.__name__[1:]}), synchronization {k}"
                self._check(means, when)
            if not torch.equal(self._module.seen, copies[0].seen):
                self._found.problems.append(f"{when}: buffer seen is not that of rank 0")
            self._found.digests[f"{when}: buffer seen"] = _digest(self._module.seen)
            with torch.no_grad():
                for parameter in self._module.parameters():
                    if parameter.grad is not None:
                        parameter.add_(parameter.grad, alpha=-0.125)

    def _actor(self, model: Any, number: int, rank: int) -> _Actor:
        # Not rank 0, as all ranks get its buffers.
        return _Actor(model, number, rank, rank == self._size - 1 > 0, self._device)

    def _bring_here(self, twin: DynamicModel) -> None:
        for theirs, own in zip(twin.parameters(), self._module.parameters(), strict=True):
            theirs.data.copy_(own.data)
            theirs.grad = None if own.grad is None else own.grad.detach().clone()
        twin.seen.copy_(self._module.seen)

    def _check(self, means: dict[str, tuple[Tensor, float] | None], when: str) -> None:
        largest = max((scale for _, scale in filter(None, means.values())), default=0.0)
        for name, parameter in self._module.named_parameters():
            wanted, gradient = means[name], parameter.grad
            self._found.digests[f"{when}: the gradient of {name}"] = _digest(gradient)
            if wanted is None or gradient is None:
                if (wanted is None) != (gradient is None):
                    should = "be None: no rank has it" if wanted is None else "exist: some rank has it"
                    self._found.problems.append(f"{when}: the gradient of {name} should {should}")
                continue
            mean, scale = wanted
            numbers, tolerance = torch.finfo(parameter.dtype), self._plugs.tolerance
            allowed = _ROUNDINGS * numbers.eps * scale + numbers.tiny if tolerance is None else tolerance * largest
            error = float((gradient.to_dense().double() - mean).abs().max()) if mean.numel() else 0.0
            if not error <= allowed:  # also where it is NaN
                self._found.problems.append(
                    f"{when}: the gradient of {name} is off the mean over all ranks by {error:.3g}, where "
                    f"{allowed:.3g} is allowed and the largest element on any rank is {scale:.3g}"
                )


def _average(copies: Sequence[nn.Module]) -> dict[str, tuple[Tensor, float] | None]:
    means: dict[str, tuple[Tensor, float] | None] = {}
    for (name, first), *others in zip(*(twin.named_parameters() for twin in copies), strict=True):
        parameters = [first, *(parameter for _, parameter in others)]
        existing = [one.grad for one in parameters if one.grad is not None]
        if not existing:
            means[name] = None
            continue
        wide = [gradient.to_dense().double() for gradient in existing]
        mean = torch.stack(wide).sum(0) / len(parameters)
        means[name] = mean, max((float(one.abs().max()) for one in wide if one.numel()), default=0.0)
        for parameter in parameters:
            gradient = torch.empty_like(parameter, requires_grad=False).copy_(mean)  # with its strides
            parameter.grad = gradient.to_sparse(1) if existing[0].is_sparse else gradient
    return means


def _digest(tensor: Tensor | None) -> str:
    if tensor is None:
        return "None"
    content = tensor.detach().to_dense().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.blake2b(content, digest_size=8).hexdigest()}"
