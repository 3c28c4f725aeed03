"""The laws of data parallelism, and how to hold a wrapper to them on any model.

    on each rank     observe(case, variant, plugs)  -->  Observation      what this rank did, saw and missed
    anywhere         breaches([observation of each rank])  -->  [str]     what is wrong, [] if nothing is

1. Every rank issues the same collectives in the same order.
2. After a synchronized backward a gradient is None if no rank has it, else the mean, the same bits on all ranks.
3. What is sent is what exists on some rank.
4. Options change the time, and results only by rounding.

A rank never stops at a breach, so that the others do not wait for it; and ranks are compared where their
observations meet, not over a transport that may itself be on trial.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from ppe_ddp.ddp import DistributedDataParallel
from ppe_ddp.errors import PpeDdpError
from ppe_ddp.functions import average
from ppe_ddp.testing.models import Recipe
from ppe_ddp.testing.steps import Expectation, Reference, Step, StepKind, Zeroing, perform

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup

    from ppe_ddp.contracts import BroadcastFunction, CommHook, GradBucket, ReduceFunction, Waitable
    from ppe_ddp.engine.trace import Trace

__all__ = [
    "Case",
    "Collective",
    "ConformanceError",
    "Observation",
    "Plugs",
    "Variant",
    "breaches",
    "check_case",
    "observe",
    "observe_all",
]

# Rounding: the sum over ranks, a second round that is added, and the accumulation into what was there.
_ROUNDINGS = 16
# Parameters that were updated with gradients that differ by rounding drift apart over a few steps.
_DRIFT = 512
_COARSEST = 0.25


class ConformanceError(PpeDdpError):
    """A backend, function or hook breaks a law; the message says which, where, and what was expected."""


@dataclass(frozen=True)
class Variant:
    """Options that must not change a result.

    Attributes:
        overlap: See :class:`ppe_ddp.Options`.
        views: Its ``gradient_as_bucket_view``.
        bucket_mb: Its ``bucket_cap_mb``: 0.0002 gives a small model many buckets.
        negotiate: The wrapper's ``negotiate_grads``; False only where all ranks have the same gradients.
    """

    overlap: bool = True
    views: bool = False
    bucket_mb: float = 25.0
    negotiate: bool = True

    @classmethod
    def every(cls, *, common_path: bool = False) -> list[Variant]:
        """All combinations; without negotiation only for models with a common path."""
        sizes = (0.0002, 25.0)
        negotiations = (True, False) if common_path else (True,)
        combinations = itertools.product((True, False), (False, True), sizes, negotiations)
        return [cls(*combination) for combination in combinations]

    def keywords(self) -> dict[str, Any]:
        """The keywords of the wrapper."""
        return {
            "overlap": self.overlap,
            "gradient_as_bucket_view": self.views,
            "bucket_cap_mb": self.bucket_mb,
            "negotiate_grads": self.negotiate,
        }


@dataclass(frozen=True)
class Case:
    """A model, and what is done with it."""

    recipe: Recipe
    steps: tuple[Step, ...] = (Step(), Step(zeroing=Zeroing.TO_ZERO))

    def fits(self, variant: Variant) -> bool:
        """Whether the law promises a result: without negotiation all ranks must have the same gradients."""
        if variant.negotiate:
            return True
        apart = {StepKind.ABSENT, StepKind.ABSENT_WITH_MICRO_BATCH}
        return self.recipe.common_path and not any(step.kind in apart for step in self.steps)


@dataclass(frozen=True)
class Plugs:
    """What is plugged into the wrapper.

    Attributes:
        reduce_function: See :class:`ppe_ddp.ReduceFunction`.
        broadcast_function: See :class:`ppe_ddp.BroadcastFunction`.
        hook: See :class:`ppe_ddp.CommHook`.
        state: The hook's; each case gets a deep copy.
        tolerance: The largest error of a mean, in units of the largest gradient element of the model on any
            rank. None: what rounding explains.
    """

    reduce_function: ReduceFunction | None = None
    broadcast_function: BroadcastFunction | None = None
    hook: CommHook | None = None
    state: object = None
    tolerance: float | None = None


@dataclass(frozen=True)
class Collective:
    """One bucket, as a function or hook got it."""

    index: int
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    is_last: bool

    @classmethod
    def of(cls, bucket: GradBucket) -> Collective:
        """The description of ``bucket``."""
        shapes = tuple(tuple(gradient.shape) for gradient in bucket)
        return cls(bucket.index(), bucket.names(), shapes, bucket.buffer().dtype, bucket.is_last())


@dataclass
class Observation:
    """What one rank saw in one case under one variant.

    Attributes:
        rank: The rank.
        title: The case and the variant.
        problems: The laws that it saw broken by itself.
        digests: For each synchronized backward, a digest of each gradient by name.
        collectives: For each synchronized backward, the buckets in the order in which this rank sent them.
        gradients: The gradients at the end.
    """

    rank: int
    title: str
    problems: list[str] = field(default_factory=list)
    digests: list[dict[str, str]] = field(default_factory=list)
    collectives: list[list[Collective]] = field(default_factory=list)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)


class _RecordedFunction:
    """A reduce function that writes down what it is asked to do."""

    def __init__(self, function: ReduceFunction, log: list[Collective]) -> None:
        self._function = function
        self._log = log
        self.__qualname__ = getattr(function, "__qualname__", type(function).__qualname__)

    def __call__(self, gradients: GradBucket, group: ProcessGroup | None, /) -> Waitable | None:
        self._log.append(Collective.of(gradients))
        return self._function(gradients, group)


class _RecordedHook:
    """A communication hook that writes down what it is asked to do."""

    def __init__(self, hook: CommHook, log: list[Collective]) -> None:
        self._hook = hook
        self._log = log
        self.__qualname__ = getattr(hook, "__qualname__", type(hook).__qualname__)

    def __call__(self, state: Any, bucket: GradBucket, /) -> torch.futures.Future[Any]:  # noqa: ANN401
        self._log.append(Collective.of(bucket))
        return self._hook(state, bucket)


def observe(
    case: Case,
    variant: Variant,
    plugs: Plugs | None = None,
    *,
    group: ProcessGroup | None = None,
    device: torch.device | str = "cpu",
) -> Observation:
    """Train one case and hold it to laws 1 to 3, as far as a rank can by itself.

    All ranks of the group must call this together, with equal arguments.

    Args:
        case: What to do. Must fit the variant.
        variant: The options.
        plugs: What to plug in; nothing by default.
        group: The ranks; None for all.
        device: Where the module is to be.

    Returns:
        What to give to :func:`breaches`, with those of the other ranks.
    """
    plugs = plugs or Plugs()
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    seen = Observation(rank, f"{case} with {variant}")
    log: list[Collective] = []
    wrapper = _wrapped(case, variant, plugs, log, group, device)
    _check_start(wrapper.module, case.recipe.build(device), seen)
    reference = Reference(wrapper.module, world_size)
    for number, step in enumerate(case.steps):
        reference.follow(wrapper.module)
        expected = list(reference.expectations(step, case.recipe, number, device))
        run = perform(step, wrapper, case.recipe, number, rank=rank, world_size=world_size, device=device)
        for k, (expectation, _) in enumerate(zip(expected, run, strict=True)):
            first = len(seen.problems)
            seen.collectives.append(log.copy())
            log.clear()
            _check_order(seen)
            _check_state(wrapper.module, expectation, plugs, seen)
            _check_trace(wrapper.trace(), wrapper.module, expectation, plugs, case, variant, seen)
            for i in range(first, len(seen.problems)):
                seen.problems[i] = f"step {number} ({step.kind.name}), backward {k}: {seen.problems[i]}"
        if step.updates:
            _update(wrapper.module)
    seen.gradients = {name: _detached(p.grad) for name, p in wrapper.module.named_parameters()}
    return seen


def observe_all(
    case: Case,
    variants: Sequence[Variant],
    plugs: Plugs | None = None,
    *,
    group: ProcessGroup | None = None,
    device: torch.device | str = "cpu",
) -> list[Observation]:
    """:func:`observe` under each variant that fits, and law 4: they agree up to rounding."""
    seen = [
        observe(case, variant, plugs, group=group, device=device)
        for variant in variants
        if case.fits(variant)
    ]
    tolerance = _drift(case.recipe.dtypes, plugs or Plugs())
    for other in seen[1:]:
        for name, gradient in seen[0].gradients.items():
            theirs = other.gradients[name]
            if gradient is None or theirs is None:
                if gradient is not theirs:
                    other.problems.append(
                        f"{name} exists under one variant only; the other is {seen[0].title}"
                    )
                continue
            scale = float(gradient.abs().max()) if gradient.numel() else 0.0
            if _distance(gradient, theirs) > tolerance * scale:
                other.problems.append(f"{name} differs by more than rounding from that of {seen[0].title}")
    return seen


def breaches(observations: Sequence[Observation]) -> list[str]:
    """What is wrong in one case, seen from all ranks; empty if all laws hold.

    Args:
        observations: Those of all ranks, of the same case and variant.
    """
    found = [f"rank {seen.rank}: {problem}" for seen in observations for problem in seen.problems]
    first = observations[0]
    for other in observations[1:]:
        who = f"rank {other.rank} and rank {first.rank}"
        found.extend(_different_gradients(who, first.digests, other.digests))
        found.extend(_different_collectives(who, first.collectives, other.collectives))
    return found


def check_case(
    case: Case,
    variant: Variant | None = None,
    plugs: Plugs | None = None,
    *,
    group: ProcessGroup | None = None,
    device: torch.device | str = "cpu",
) -> None:
    """Hold one case to laws 1 to 3, from inside a rank; arguments as for :func:`observe`.

    Raises:
        ConformanceError: A law is broken. Raised on every rank, with the same text.
    """
    seen = observe(case, variant or Variant(), plugs, group=group, device=device)
    seen.gradients = {}
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, seen, group=group)
    found = breaches(everyone)
    if found:
        raise ConformanceError("\n".join([seen.title, *found]))


def _wrapped(
    case: Case,
    variant: Variant,
    plugs: Plugs,
    log: list[Collective],
    group: ProcessGroup | None,
    device: torch.device | str,
) -> DistributedDataParallel:
    module = case.recipe.build(device)
    rank = dist.get_rank(group)
    if rank != 0:
        with torch.no_grad():  # the wrapper has to bring rank 0's here
            for tensor in itertools.chain(module.parameters(), module.buffers()):
                tensor.fill_(rank)
    wrapper = DistributedDataParallel(
        module,
        process_group=group,
        reduce_function=_RecordedFunction(plugs.reduce_function or average, log),
        broadcast_function=plugs.broadcast_function,
        **variant.keywords(),
    )
    if plugs.hook is not None:
        hook = _RecordedHook(plugs.hook, log)
        wrapper.register_comm_hook(copy.deepcopy(plugs.state), hook)
    return wrapper


def _check_start(module: nn.Module, original: nn.Module, seen: Observation) -> None:
    theirs = original.state_dict()
    wrong = [name for name, tensor in module.state_dict().items() if not torch.equal(tensor, theirs[name])]
    if wrong:
        seen.problems.append(f"after wrapping, {', '.join(wrong)} should be those of rank 0")


def _check_order(seen: Observation) -> None:
    """Law 1, within a rank: buckets are counted up, and the last one says so, in each round."""
    sent = seen.collectives[-1]
    if sent and not sent[-1].is_last:
        seen.problems.append("law 1: the last bucket does not say that it is the last")
    for earlier, later in itertools.pairwise(sent):
        if not earlier.is_last and earlier.index >= later.index:
            seen.problems.append(f"law 1: bucket {later.index} comes after bucket {earlier.index}")


def _check_state(module: nn.Module, expected: Expectation, plugs: Plugs, seen: Observation) -> None:
    """Law 2, as far as a rank can tell alone, and the buffers of rank 0."""
    largest = max(expected.scales.values(), default=0.0)
    digests: dict[str, str] = {}
    for name, parameter in module.named_parameters():
        mean, gradient = expected.means[name], parameter.grad
        digests[name] = _digest(gradient)
        if mean is None or gradient is None:
            if mean is not gradient:
                should = "be None: no rank has it" if mean is None else "exist: some rank has it"
                seen.problems.append(f"law 2: the gradient of {name} should {should}")
            continue
        if plugs.tolerance is None:
            finest = torch.finfo(parameter.dtype)
            allowed = _ROUNDINGS * finest.eps * expected.scales[name] + finest.tiny
        else:
            allowed = plugs.tolerance * largest
        error = _distance(gradient, mean)
        if not error <= allowed:  # also where it is NaN
            seen.problems.append(
                f"law 2: the gradient of {name} is off the mean over all ranks by {error:.3g}, where {allowed:.3g} is "
                f"allowed and the largest element on any rank is {expected.scales[name]:.3g}"
            )
    seen.digests.append(digests)
    for name, buffer in module.named_buffers():
        if not torch.equal(buffer, expected.buffers[name]):
            seen.problems.append(f"buffer {name} is not that of rank 0")


def _check_trace(
    trace: Trace | None,
    module: nn.Module,
    expected: Expectation,
    plugs: Plugs,
    case: Case,
    variant: Variant,
    seen: Observation,
) -> None:
    """Law 3: what is sent is what exists."""
    if trace is None:
        seen.problems.append("law 3: a synchronized backward left no trace")
        return
    nbytes = {name: p.numel() * p.element_size() for name, p in module.named_parameters()}
    agreed, repaired, local = set(trace.agreed), set(trace.repaired), set(trace.local)
    # Only the parameters inside a reentrant checkpoint are found out about late.
    is_exact = not (case.recipe.is_reentrant and variant.overlap)
    _same(seen, "the gradients agreed on", agreed | repaired, set(expected.union))
    if is_exact:
        _same(seen, "the gradients of this rank", local, set(expected.present[seen.rank]))
        _same(seen, "the gradients sent in a second round", repaired, set())
    keeps_state = plugs.hook is not None and plugs.state is not None
    wanted = sum(nbytes[name] for name in agreed) + sum(nbytes[name] for name in repaired)
    if not keeps_state and trace.gradient_nbytes != wanted:
        seen.problems.append(f"law 3: {trace.gradient_nbytes} bytes of gradients were sent, {wanted} exist")


def _same(seen: Observation, what: str, got: set[str], wanted: set[str]) -> None:
    if got != wanted:
        seen.problems.append(
            f"law 3: {what} should be the existing ones; missing {sorted(wanted - got)}, too many {sorted(got - wanted)}"
        )


def _different_gradients(who: str, ours: list[dict[str, str]], theirs: list[dict[str, str]]) -> list[str]:
    if len(ours) != len(theirs):
        return [f"{who} synchronized {len(theirs)} and {len(ours)} times"]
    for k, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        names = [name for name, digest in mine.items() if other[name] != digest]
        if names:
            return [f"law 2: after synchronization {k}, {who} have different bits in {', '.join(names)}"]
    return []


def _different_collectives(
    who: str, ours: list[list[Collective]], theirs: list[list[Collective]]
) -> list[str]:
    for k, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        for a, b in itertools.zip_longest(other, mine):
            if a != b:
                return [f"law 1: in synchronization {k}, {who} differ in what they send: {a} and {b}"]
    return []


def _update(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.125)


def _digest(gradient: Tensor | None) -> str:
    if gradient is None:
        return "None"
    plain = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    content = plain.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    digest = hashlib.blake2b(content, digest_size=8)
    digest.update(f"{gradient.dtype} {tuple(gradient.shape)}".encode())
    return digest.hexdigest()


def _distance(ours: Tensor, theirs: Tensor) -> float:
    if ours.shape != theirs.shape:
        return float("inf")
    if not ours.numel():
        return 0.0
    wide = torch.complex128 if ours.is_complex() else torch.float64
    return float((ours.to(wide) - theirs.to(wide)).abs().max())


def _detached(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.detach().cpu().clone()


def _drift(dtypes: frozenset[torch.dtype], plugs: Plugs) -> float:
    if plugs.tolerance is not None:
        return max(_COARSEST, plugs.tolerance)
    return min(_COARSEST, _DRIFT * max(torch.finfo(dtype).eps for dtype in dtypes))
