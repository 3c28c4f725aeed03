"""Training that a backend, function or hook must get right: models whose graph differs on each rank and step.

Each rank also takes the steps of all ranks, without communication, on copies of the module in its own process: so it
knows what the mean must be. It goes on after an error, so that no other rank waits for it, and results are compared
outside, not by a transport that may itself be on trial.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.checkpoint import checkpoint

from ppe_ddp.ddp import DistributedDataParallel

if TYPE_CHECKING:
    from ppe_ddp.contracts import BroadcastFunction, CommHook, ReduceFunction

_WIDTH, _ROWS, _EMBEDDED = 5, 2, 6
# The sum over ranks, a second round that is added, and the accumulation into what was there.
_ROUNDINGS = 16
# What must not change a result: of the wrapper.
_VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"gradient_as_bucket_view": False, "bucket_cap_mb": 0.0002},
    {"overlap": False, "bucket_cap_mb": 0.0002},
)


@dataclass(frozen=True)
class Plugs:
    """The functions and hooks that are plugged into the wrapper.

    Attributes:
        reduce_function: See :class:`ppe_ddp.ReduceFunction`.
        broadcast_function: See :class:`ppe_ddp.BroadcastFunction`.
        hook: See :class:`ppe_ddp.CommHook`.
        state: The hook's; each wrapper gets a deep copy.
        tolerance: The largest error of a mean, in units of the largest gradient element of the model on any
            rank. None: what rounding explains.
    """

    reduce_function: ReduceFunction | None = None
    broadcast_function: BroadcastFunction | None = None
    hook: CommHook | None = None
    state: object = None
    tolerance: float | None = None


class Trained(NamedTuple):
    """The findings of one rank.

    Attributes:
        problems: What is wrong, one sentence each.
        digests: By step and name, digests of gradients and buffers, which must be the same on all ranks.
    """

    problems: list[str]
    digests: dict[str, str]


class _LinearOfDtype(nn.Module):
    """A linear map in its own dtype, of activations in float32."""

    def __init__(self, dtype: torch.dtype, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn((_WIDTH, _WIDTH), generator=generator).div(2).to(dtype))
        self.bias = nn.Parameter(torch.zeros(_WIDTH, dtype=dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh((hidden.to(self.weight.dtype) @ self.weight + self.bias).float())


class DynamicModel(nn.Module):
    """Layers that are used, or not, by a path that each forward draws anew.

    Args:
        dtypes: Of the parameters, in turn.
        has_sparse: Whether there is an embedding whose gradient is sparse.
    """

    seen: Tensor

    def __init__(self, dtypes: Sequence[torch.dtype], *, has_sparse: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        maps = [_LinearOfDtype(dtypes[k % len(dtypes)], generator) for k in range(9)]
        self.first, self.recomputed, self.unused = maps[:3]
        self.branches, self.heads = nn.ModuleList(maps[3:6]), nn.ModuleList(maps[6:8])
        self.frozen = maps[8].requires_grad_(False)
        self.empty = nn.Parameter(torch.zeros((0, _WIDTH), dtype=dtypes[0]))
        self.factor = nn.Parameter(torch.ones((), dtype=dtypes[-1]))
        table = torch.randn((_EMBEDDED, _WIDTH), generator=generator)
        self.rows = nn.Embedding(_EMBEDDED, _WIDTH, sparse=True, _weight=table) if has_sparse else None
        self.register_buffer("seen", torch.zeros(_WIDTH, dtype=torch.float64))

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
    """One rank in one step, with the wrapper or with a copy of the module."""

    model: Callable[..., list[Tensor]]
    number: int
    rank: int
    is_absent: bool
    device: str

    def losses(self, forward: int = 0) -> list[Tensor]:
        seed = f"{self.number} {self.rank} {forward}"  # by its hash, which is the same in every process
        generator = torch.Generator().manual_seed(Random(seed).getrandbits(60))
        batch = torch.randn(_ROWS, _WIDTH, generator=generator).to(self.device).requires_grad_()
        return [(output + 0.5).square().mean() for output in self.model(batch, Random(f"path {seed}"))]

    def loss(self, forward: int = 0) -> Tensor:
        return torch.stack(self.losses(forward)).sum()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        model = self.model
        return model.no_sync() if isinstance(model, DistributedDataParallel) else contextlib.nullcontext()

    def finish(self) -> None:
        if isinstance(self.model, DistributedDataParallel):
            self.model.finish_grad_sync()


# ---------------------------------------------------------------------- steps, which stop after each synchronization


def _one_backward(actor: _Actor) -> Iterator[None]:
    actor.loss().backward()
    yield


def _micro_batches(actor: _Actor) -> Iterator[None]:
    with actor.no_sync():
        actor.loss(1).backward()
    actor.loss().backward()
    yield


def _absent(actor: _Actor) -> Iterator[None]:
    actor.finish() if actor.is_absent else actor.loss().backward()
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


# With how gradients are cleared before: to None, to zero, or not at all.
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
    """Take steps of many kinds with each variant of options; all ranks of the default group call this together."""
    trained = Trained([], {})
    for options in _VARIANTS:
        _WrapperOnTrial(plugs, options, DynamicModel(dtypes, has_sparse=has_sparse).to(device), device, trained).run()
    return trained


class _WrapperOnTrial:
    """A wrapper with some plugs and options, and what was found in its steps."""

    def __init__(
        self, plugs: Plugs, options: dict[str, Any], module: DynamicModel, device: str, found: Trained
    ) -> None:
        self._module, self._device, self._found, self._plugs = module, device, found, plugs
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._name = ", ".join(f"{name}={value}" for name, value in options.items()) or "default options"
        start = copy.deepcopy(module.state_dict())
        if self._rank != 0:
            with torch.no_grad():  # the wrapper has to bring rank 0's here
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
        """Take all steps."""
        for number, (step, set_to_none) in enumerate(_STEPS):
            copies = [self._copy() for _ in range(self._size)]
            actors = [self._actor(twin, number, rank) for rank, twin in enumerate(copies)]
            if set_to_none is not None:
                for model in (self._wrapper, *copies):
                    model.zero_grad(set_to_none)
            # The copies are first, since a graph is gone through with the buffers that it was made with.
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
        # The last rank, and not rank 0, whose buffers all have.
        return _Actor(model, number, rank, rank == self._size - 1 > 0, self._device)

    def _copy(self) -> DynamicModel:
        twin = copy.deepcopy(self._module)
        for theirs, own in zip(twin.parameters(), self._module.parameters(), strict=True):
            theirs.grad = None if own.grad is None else own.grad.detach().clone()
        return twin

    def _check(self, means: dict[str, tuple[Tensor, float] | None], when: str) -> None:
        """Compare the gradients with the means and the largest elements on any rank."""
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
    """The mean of each gradient, which all get, in float64, and its largest element on any; None where none has it."""
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
            gradient = mean.to(parameter.dtype, copy=True)
            parameter.grad = gradient.to_sparse(1) if existing[0].is_sparse else gradient
    return means


def _digest(tensor: Tensor | None) -> str:
    if tensor is None:
        return "None"
    content = tensor.detach().to_dense().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.blake2b(content, digest_size=8).hexdigest()}"
