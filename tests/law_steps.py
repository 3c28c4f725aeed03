"""Training steps for a wrapper, and the gradients that they must give, computed in one process.

A step is a generator that stops after each synchronized backward. A rank runs one, with the wrapper; the
:class:`Reference` runs those of all ranks side by side on copies of the module and averages where they stop.
"""

from __future__ import annotations

import contextlib
import copy
import enum
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from law_models import losses

if TYPE_CHECKING:
    from torch import Tensor, nn

    from law_models import Recipe


class StepKind(enum.Enum):
    """The kind of a training step."""

    ONE_BACKWARD = enum.auto()  # one forward, one backward
    MICRO_BATCHES = enum.auto()  # two backwards in no_sync(), then one that synchronizes all three
    TWO_BACKWARDS = enum.auto()  # two forwards, each with a backward
    TWO_FORWARDS_TWO_BACKWARDS = enum.auto()  # two forwards, and then a backward of each
    TWO_LOSSES = enum.auto()  # one forward with two losses, each with a backward
    RETAINED_GRAPH = enum.auto()  # the same graph backwards twice
    TWO_FORWARDS = enum.auto()  # two forwards, one backward
    ABSENT = enum.auto()  # one rank has no backward and calls finish_grad_sync()
    ABSENT_WITH_MICRO_BATCH = enum.auto()  # one rank has no backward but a gradient from no_sync(), and starts early
    LOOK = enum.auto()  # one rank alone calls autograd.grad before the backward
    SOME_INPUTS = enum.auto()  # backward(inputs=...) for the last parameters only

    def __repr__(self) -> str:
        return f"StepKind.{self.name}"


class Zeroing(enum.Enum):
    """How gradients are cleared before a step."""

    TO_NONE = enum.auto()  # zero_grad(set_to_none=True)
    TO_ZERO = enum.auto()  # zero_grad(set_to_none=False)
    NOTHING = enum.auto()  # they stay and are added to

    def __repr__(self) -> str:
        return f"Zeroing.{self.name}"


@dataclass(frozen=True)
class TrainingStep:
    """One training step.

    Attributes:
        kind: What it does.
        zeroing: What happens to gradients before it.
        updates: Whether the parameters are changed after it, by plain gradient descent.
    """

    kind: StepKind = StepKind.ONE_BACKWARD
    zeroing: Zeroing = Zeroing.TO_NONE
    updates: bool = True


class _Subject(Protocol):
    """The interface that a step uses: of the wrapper, or of a copy of the module that does not communicate."""

    def __call__(self, *args: Any) -> Any: ...
    def no_sync(self) -> AbstractContextManager[None]: ...
    def start_grad_sync(self) -> None: ...
    def finish_grad_sync(self) -> None: ...
    def parameters(self) -> Iterator[nn.Parameter]: ...
    def zero_grad(self, set_to_none: bool = True) -> None: ...


@dataclass(frozen=True)
class _RankStep:
    """One rank in one step."""

    subject: _Subject
    recipe: Recipe
    number: int
    rank: int
    world_size: int
    device: torch.device
    weigh: Callable[[Tensor, int], Tensor]

    @property
    def is_chosen(self) -> bool:
        """Whether this is the rank that does something else, another one in every step."""
        return (self.number + self.recipe.seed) % self.world_size == self.rank

    def batch(self, forward: int) -> Tensor:
        return self.recipe.batch(self.number, self.rank, forward).detach().to(self.device).requires_grad_()

    def losses(self, forward: int = 0, batch: Tensor | None = None) -> list[Tensor]:
        batch = self.batch(forward) if batch is None else batch
        return losses(self.subject(batch, self.recipe.path(self.number, self.rank, forward)))

    def loss(self, forward: int = 0, batch: Tensor | None = None) -> Tensor:
        return self.weigh(torch.stack(self.losses(forward, batch)).sum(), forward)


def perform(
    step: TrainingStep,
    subject: _Subject,
    recipe: Recipe,
    number: int,
    *,
    rank: int,
    world_size: int,
    device: torch.device | str = "cpu",
    weigh: Callable[[Tensor, int], Tensor] = lambda loss, forward: loss,
) -> Iterator[None]:
    """Do ``step`` as ``rank``, stopping after each synchronized backward.

    Args:
        step: What to do.
        subject: What to do it with. A wrapper needs all ranks to do the same step together.
        recipe: The description of the module inside.
        number: The number of the step, which decides inputs and paths.
        rank: Whose inputs and paths.
        world_size: How many ranks there are.
        device: Where the module is.
        weigh: Gives the loss of a forward its weight; not in steps of several losses.
    """
    if step.zeroing is not Zeroing.NOTHING:
        subject.zero_grad(set_to_none=step.zeroing is Zeroing.TO_NONE)
    actor = _RankStep(subject, recipe, number, rank, world_size, torch.device(device), weigh)
    kind = step.kind
    if recipe.is_reentrant and kind in (StepKind.LOOK, StepKind.SOME_INPUTS):
        kind = StepKind.ONE_BACKWARD  # torch refuses both with reentrant checkpoints
    return globals()[f"_{kind.name.lower()}"](actor)  # type: ignore[no-any-return]


def _one_backward(actor: _RankStep) -> Iterator[None]:
    actor.loss().backward()
    yield


def _micro_batches(actor: _RankStep) -> Iterator[None]:
    with actor.subject.no_sync():
        for forward in (0, 1):
            actor.loss(forward).backward()
    actor.loss(2).backward()
    yield


def _two_backwards(actor: _RankStep) -> Iterator[None]:
    for forward in (0, 1):
        actor.loss(forward).backward()
        yield


def _two_forwards_two_backwards(actor: _RankStep) -> Iterator[None]:
    for loss in [actor.loss(0), actor.loss(1)]:
        loss.backward()
        yield


def _two_losses(actor: _RankStep) -> Iterator[None]:
    first, *others = actor.losses()
    first.backward(retain_graph=True)
    yield
    (torch.stack(others).sum() if others else first * 0.5).backward()
    yield


def _retained_graph(actor: _RankStep) -> Iterator[None]:
    loss = actor.loss()
    for retain in (True, False):
        loss.backward(retain_graph=retain)
        yield


def _two_forwards(actor: _RankStep) -> Iterator[None]:
    (actor.loss(0) + 2 * actor.loss(1)).backward()
    yield


def _absent(actor: _RankStep) -> Iterator[None]:
    if actor.is_chosen:
        actor.subject.finish_grad_sync()
    else:
        actor.loss().backward()
    yield


def _absent_with_micro_batch(actor: _RankStep) -> Iterator[None]:
    with actor.subject.no_sync():
        actor.loss(0).backward()
    if actor.is_chosen:
        actor.subject.start_grad_sync()
        actor.subject.finish_grad_sync()
    else:
        actor.loss(1).backward()
    yield


def _look(actor: _RankStep) -> Iterator[None]:
    if actor.is_chosen:
        batch = actor.batch(1)
        torch.autograd.grad(actor.loss(1, batch), batch, allow_unused=True)
    actor.loss().backward()
    yield


def _some_inputs(actor: _RankStep) -> Iterator[None]:
    loss = actor.loss()
    trained = [parameter for parameter in actor.subject.parameters() if parameter.requires_grad]
    # The heads come last, so that there is something to reach on every path.
    loss.backward(inputs=trained[-2 * actor.recipe.heads - 1 :])
    yield


class LocalSubject:
    """A copy of a module that does not communicate."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.parameters = module.parameters
        self.zero_grad = module.zero_grad

    def __call__(self, *args: Any) -> Any:
        return self.module(*args)

    def no_sync(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def start_grad_sync(self) -> None:
        pass

    def finish_grad_sync(self) -> None:
        pass


@dataclass(frozen=True)
class Expectation:
    """The expected gradients after a synchronized backward.

    Attributes:
        means: The mean gradient by name, in the widest dtype; None where no rank has one.
        scales: By name, the largest magnitude in that gradient on any rank: the measure for rounding.
        present: For each rank, the names of the gradients that it has before they are averaged.
        buffers: The buffers, those of each submodule by the first rank that has written any of them.
    """

    means: dict[str, Tensor | None]
    scales: dict[str, float]
    present: tuple[frozenset[str], ...]
    buffers: dict[str, Tensor]

    @property
    def union(self) -> frozenset[str]:
        """The names of the gradients that exist on any rank."""
        return frozenset().union(*self.present)


class Reference:
    """All ranks in one process: a copy of the module for each, averaged by hand.

    Args:
        module: Any module of the kind; it is not changed.
        world_size: How many ranks to be.
    """

    absent: Collection[int] = ()
    """Ranks that have run out of inputs, and do nothing."""

    def __init__(self, module: nn.Module, world_size: int) -> None:
        self._copies = [copy.deepcopy(module) for _ in range(world_size)]
        self._parameters = [dict(twin.named_parameters()) for twin in self._copies]
        self._give_buffers(dict(module.named_buffers()))

    @property
    def copies(self) -> list[nn.Module]:
        """The module of each rank, to do something with before a step."""
        return self._copies

    def copy_state(self, module: nn.Module) -> None:
        """Copy the state of ``module``, with its gradients, for all ranks.

        Rounding does not pile up over steps if each step begins with this.
        """
        own = list(module.parameters())
        with torch.no_grad():
            for twins in self._parameters:
                for twin, parameter in zip(twins.values(), own, strict=True):
                    twin.copy_(parameter)
                    twin.grad = None if parameter.grad is None else parameter.grad.detach().clone()
            self._give_buffers(dict(module.named_buffers()))

    def expectations(
        self, step: TrainingStep, recipe: Recipe, number: int, device: torch.device | str = "cpu"
    ) -> Iterator[Expectation]:
        """Do ``step`` as all ranks; yields after each synchronized backward."""
        count = len(self._copies)
        runs = [
            perform(
                step,
                LocalSubject(twin),
                recipe,
                number,
                rank=rank,
                world_size=count,
                device=device,
                weigh=self._weigher(step, number, rank),
            )
            for rank, twin in enumerate(self._copies)
            if rank not in self.absent
        ]
        for _ in zip(*runs, strict=True):
            yield self._average()

    def _weigher(self, step: TrainingStep, number: int, rank: int) -> Callable[[Tensor, int], Tensor]:
        return lambda loss, forward: loss

    def _average(self) -> Expectation:
        means: dict[str, Tensor | None] = {}
        scales: dict[str, float] = {}
        tables = self._parameters
        present = tuple(
            frozenset(name for name, parameter in table.items() if parameter.grad is not None) for table in tables
        )
        for name in tables[0]:
            parameters = [table[name] for table in tables]
            gradients = [_wide(p.grad) for p in parameters if p.grad is not None]
            if not gradients:
                means[name] = None
                continue
            mean = torch.stack(gradients).sum(0) / len(parameters)
            means[name] = mean
            scales[name] = max((float(g.abs().max()) for g in gradients if g.numel()), default=0.0)
            is_sparse = any(p.grad is not None and p.grad.is_sparse for p in parameters)
            for parameter in parameters:
                gradient = torch.empty_like(parameter).copy_(mean)
                parameter.grad = gradient.to_sparse(1) if is_sparse else gradient
        self._give_buffers(self._written_buffers())
        return Expectation(means, scales, present, self._buffers)

    def _written_buffers(self) -> dict[str, Tensor]:
        """Each buffer of the first rank that has written one of its submodule; of rank 0 where none has."""
        writers: dict[str, nn.Module] = {}
        found = {}
        for name in self._buffers:
            owner, _, key = name.rpartition(".")
            if owner not in writers:
                writers[owner] = self._writer(owner)
            found[name] = writers[owner].get_buffer(key)
        return found

    def _writer(self, owner: str) -> nn.Module:
        """The submodule ``owner`` of the first rank that has written one of its buffers; of rank 0 where none has."""
        modules = [module.get_submodule(owner) for module in self._sources()]
        prefix = f"{owner}." if owner else ""
        for module in modules:
            own = module.named_buffers(recurse=False)
            if any(not torch.equal(buffer, self._buffers[prefix + key]) for key, buffer in own):
                return module
        return modules[0]

    def _sources(self) -> Sequence[nn.Module]:
        """The modules of the ranks that may send buffers."""
        return self._copies

    def _give_buffers(self, values: dict[str, Tensor]) -> None:
        """Replace the buffers: a graph that is still to be gone through keeps those that it was made with."""
        self._buffers = {name: value.clone() for name, value in values.items()}
        owners: dict[str, list[nn.Module]] = {}
        for name, value in values.items():
            owner, _, key = name.rpartition(".")
            if owner not in owners:
                owners[owner] = [module.get_submodule(owner) for module in self._copies]
            for module in owners[owner]:
                module._buffers[key] = value.clone()


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to_dense().to(torch.complex128 if tensor.is_complex() else torch.float64)
