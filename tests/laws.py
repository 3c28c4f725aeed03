"""Checks a wrapper against the laws of data parallelism, on any model.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch import nn

from law_steps import Expectation, Reference, StepKind, TrainingStep, Zeroing, perform
from ppe_ddp.ddp import DistributedDataParallel
from ppe_ddp.testing.probes import Plugs

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from law_models import Recipe
    from ppe_ddp.contracts import GradBucket

# Rounding: the sum over ranks, a second round that is added, and the accumulation into what was there.
_ROUNDINGS = 16
# Parameters that were updated with gradients that differ by rounding drift apart over a few steps.
_DRIFT = 512
_COARSEST = 0.25
_DIGEST_SIZE = 8


@dataclass(frozen=True)
class Variant:
    """Options that must not change a result.

    Attributes:
        overlap: See :class:`ppe_ddp.Options`.
        views: Its ``gradient_as_bucket_view``.
        bucket_mb: Its ``bucket_cap_mb``: 0.0002 gives a small model many buckets.
        negotiate: The wrapper's ``negotiate_grads``; False only where all ranks have the same gradients.
        shared_memory: As the wrapper has it.
    """

    overlap: bool = True
    views: bool = False
    bucket_mb: float = 25.0
    negotiate: bool = True
    shared_memory: bool = True

    def keywords(self) -> dict[str, Any]:
        """The keywords of the wrapper."""
        return {
            "overlap": self.overlap,
            "gradient_as_bucket_view": self.views,
            "bucket_cap_mb": self.bucket_mb,
            "negotiate_grads": self.negotiate,
            "shared_memory": self.shared_memory,
        }


@dataclass(frozen=True)
class Case:
    """A model, and what is done with it."""

    recipe: Recipe
    steps: tuple[TrainingStep, ...] = (TrainingStep(), TrainingStep(zeroing=Zeroing.TO_ZERO))

    def supports(self, variant: Variant) -> bool:
        """Whether the laws apply under ``variant``: without negotiation all ranks must have the same gradients."""
        if variant.negotiate:
            return True
        apart = {StepKind.ABSENT, StepKind.ABSENT_WITH_MICRO_BATCH}
        return self.recipe.common_path and not any(step.kind in apart for step in self.steps)


@dataclass(frozen=True)
class RecordedBucket:
    """One bucket, as a function or hook got it."""

    index: int
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    is_last: bool

    @classmethod
    def of(cls, bucket: GradBucket) -> RecordedBucket:
        """The description of ``bucket``."""
        shapes = tuple(tuple(gradient.shape) for gradient in bucket)
        return cls(bucket.index(), bucket.names(), shapes, bucket.buffer().dtype, bucket.is_last())


class Recorded:
    """A reduce function, or hook, that notes the buckets it gets in a log; otherwise it is as it was."""

    def __init__(self, function: Callable[..., Any], log: list[RecordedBucket], place: int) -> None:
        self._function = function
        self._log = log
        self._place = place  # of the bucket among the arguments
        self.takes_divided = getattr(function, "takes_divided", False)
        self.__qualname__ = getattr(function, "__qualname__", type(function).__qualname__)

    def __call__(self, *arguments: Any) -> Any:
        """Log the bucket, and reduce it."""
        self._log.append(RecordedBucket.of(arguments[self._place]))
        return self._function(*arguments)


@dataclass
class Observation:
    """The observations of one rank in one case under one variant.

    Attributes:
        rank: The rank.
        title: The case and the variant.
        problems: The laws that it saw broken by itself.
        digests: For each synchronized backward, a digest of each gradient by name.
        buckets: For each of them, the names in each bucket and whether it was of the second round, in the
            order in which this rank sent them.
        collectives: For each of them, what a function or hook that was plugged in got.
        gradients: The gradients at the end.
    """

    rank: int
    title: str
    problems: list[str] = field(default_factory=list)
    digests: list[dict[str, str]] = field(default_factory=list)
    buckets: list[list[tuple[tuple[str, ...], bool]]] = field(default_factory=list)
    collectives: list[list[RecordedBucket]] = field(default_factory=list)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)


class _Observer:
    """Wraps one case's module on this rank, and checks what each step leaves."""

    def __init__(
        self, case: Case, variant: Variant, plugs: Plugs, *, group: ProcessGroup | None, device: torch.device | str
    ) -> None:
        self._case = case
        self._variant = variant
        self._plugs = plugs
        self._rank = dist.get_rank(group)
        self._device = device
        self._log: list[RecordedBucket] = []
        self.seen = Observation(self._rank, f"{case} with {variant}")
        self.wrapper = self._wrap(group)
        self.module: nn.Module = self.wrapper.module
        self._check_start()

    def _wrap(self, group: ProcessGroup | None) -> DistributedDataParallel:
        plugs = self._plugs
        module = self._case.recipe.build(self._device)
        if self._rank != 0:
            with torch.no_grad():  # the wrapper has to bring rank 0's here
                for tensor in itertools.chain(module.parameters(), module.buffers()):
                    tensor.fill_(self._rank)
        function = plugs.reduce_function
        wrapper = DistributedDataParallel(
            module,
            process_group=group,
            reduce_function=None if function is None else Recorded(function, self._log, 0),
            broadcast_function=plugs.broadcast_function,
            **self._variant.keywords(),
        )
        if plugs.hook is not None:
            wrapper.register_comm_hook(copy.deepcopy(plugs.state), Recorded(plugs.hook, self._log, 1))
        return wrapper

    def _check_start(self) -> None:
        theirs = self._case.recipe.build(self._device).state_dict()
        mine = self.module.state_dict()
        wrong = [name for name, tensor in mine.items() if not torch.equal(tensor, theirs[name])]
        if wrong:
            self.seen.problems.append(f"after wrapping, {', '.join(wrong)} should be those of rank 0")

    def check(self, expected: Expectation, when: str) -> None:
        """Check the state after a synchronized backward, the one of ``when``."""
        first = len(self.seen.problems)
        self._check_gradients(expected)
        self._check_buffers(expected)
        self._check_order()
        self._check_bytes(expected)
        self.seen.problems[first:] = [f"{when}: {problem}" for problem in self.seen.problems[first:]]

    def _check_gradients(self, expected: Expectation) -> None:
        """Law 2, as far as a rank can tell alone."""
        digests: dict[str, str] = {}
        for name, parameter in self.module.named_parameters():
            mean, gradient = expected.means[name], parameter.grad
            digests[name] = digest_of(gradient)
            if mean is None or gradient is None:
                if mean is not gradient:
                    should = "be None: no rank has it" if mean is None else "exist: some rank has it"
                    self.seen.problems.append(f"law 2: the gradient of {name} should {should}")
                continue
            allowed, error = self._allowed(name, parameter.dtype, expected), _distance(gradient, mean)
            if not error <= allowed:  # also where it is NaN
                self.seen.problems.append(
                    f"law 2: the gradient of {name} is off the mean over all ranks by {error:.3g}, where {allowed:.3g} "
                    f"is allowed and the largest element on any rank is {expected.scales[name]:.3g}"
                )
        self.seen.digests.append(digests)

    def _allowed(self, name: str, dtype: torch.dtype, expected: Expectation) -> float:
        if self._plugs.tolerance is not None:
            return self._plugs.tolerance * max(expected.scales.values(), default=0.0)
        numbers = torch.finfo(dtype)
        return _ROUNDINGS * numbers.eps * expected.scales[name] + numbers.tiny

    def _check_buffers(self, expected: Expectation) -> None:
        for name, buffer in self.module.named_buffers():
            if not torch.equal(buffer, expected.buffers[name]):
                self.seen.problems.append(f"buffer {name} is not that of rank 0")

    def _check_order(self) -> None:
        """Law 1, within a rank: buckets are counted up in each round, and the last one says that it is."""
        sent = self._log.copy()
        self._log.clear()
        self.seen.collectives.append(sent)
        if sent and not sent[-1].is_last:
            self.seen.problems.append("law 1: the last bucket does not say that it is the last")
        for earlier, later in itertools.pairwise(sent):
            if not earlier.is_last and earlier.index >= later.index:
                self.seen.problems.append(f"law 1: bucket {later.index} comes after bucket {earlier.index}")

    def _check_bytes(self, expected: Expectation) -> None:
        """Law 3: what is sent is what exists."""
        trace = self.wrapper.trace()
        if trace is None:
            self.seen.problems.append("law 3: a synchronized backward left no trace")
            return
        self.seen.buckets.append([(bucket.parameters, bucket.repair) for bucket in trace.buckets])
        agreed, repaired = set(trace.agreed), set(trace.repaired)
        keeps_state = self._plugs.hook is not None and self._plugs.state is not None
        if keeps_state:  # its buckets are the same in every step, whatever exists
            repaired &= expected.union
        self._same("the gradients agreed on", agreed | repaired, expected.union)
        # Only the parameters inside a reentrant checkpoint are found out about late.
        if not (self._case.recipe.is_reentrant and self._variant.overlap):
            self._same("the gradients of this rank", set(trace.local), expected.present[self._rank])
            self._same("the gradients sent in a second round", repaired, frozenset())
        if keeps_state:
            return
        nbytes = _dense_nbytes(self.module)
        wanted = sum(nbytes.get(name, 0) for name in (*agreed, *repaired))
        sent = sum(bucket.nbytes for bucket in trace.buckets if nbytes.keys() >= set(bucket.parameters))
        if sent != wanted:
            self.seen.problems.append(f"law 3: {sent} bytes of dense gradients were sent, {wanted} exist")

    def _same(self, what: str, got: set[str], wanted: frozenset[str]) -> None:
        withheld = self._case.recipe.withheld  # of which nobody knows before whether they come
        if got - withheld != wanted - withheld:
            self.seen.problems.append(
                f"law 3: {what} should be the existing ones; missing {sorted(wanted - got)}, "
                f"too many {sorted(got - wanted)}"
            )


def observe(
    case: Case,
    variant: Variant,
    plugs: Plugs | None = None,
    *,
    group: ProcessGroup | None = None,
    device: torch.device | str = "cpu",
) -> Observation:
    """Train one case and hold it to laws 1 to 3, as far as a rank can by itself.

    All ranks of the group must call this together, with equal arguments; the case must fit the variant.
    """
    observer = _Observer(case, variant, plugs or Plugs(), group=group, device=device)
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    reference = Reference(observer.module, world_size)
    for number, step in enumerate(case.steps):
        reference.copy_state(observer.module)
        expected = list(reference.expectations(step, case.recipe, number, device))
        run = perform(step, observer.wrapper, case.recipe, number, rank=rank, world_size=world_size, device=device)
        for k, (expectation, _) in enumerate(zip(expected, run, strict=True)):
            observer.check(expectation, f"step {number} ({step.kind.name}), backward {k}")
        if step.updates:
            _update(observer.module)
    observer.seen.gradients = {name: parameter.grad for name, parameter in observer.module.named_parameters()}
    return observer.seen


def observe_all(
    case: Case,
    variants: Sequence[Variant],
    plugs: Plugs | None = None,
    *,
    group: ProcessGroup | None = None,
    device: torch.device | str = "cpu",
) -> list[Observation]:
    """:func:`observe` under each variant that fits, and law 4: they agree up to rounding."""
    seen = [observe(case, variant, plugs, group=group, device=device) for variant in variants if case.supports(variant)]
    tolerance = _drift(case.recipe.dtypes, plugs or Plugs())
    for other in seen[1:]:
        for name, gradient in seen[0].gradients.items():
            theirs = other.gradients[name]
            if gradient is None or theirs is None:
                if gradient is not theirs:
                    other.problems.append(f"law 4: {name} exists here, but not with {seen[0].title}, or the reverse")
            elif _distance(gradient, theirs) > tolerance * _largest(gradient):
                other.problems.append(f"law 4: {name} differs by more than rounding from that with {seen[0].title}")
    return seen


def breaches(observations: Sequence[Observation]) -> list[str]:
    """The broken laws, by the observations of all ranks in the same case and variant; empty if all hold."""
    found = [f"rank {seen.rank}: {problem}" for seen in observations for problem in seen.problems]
    first = observations[0]
    for other in observations[1:]:
        who = f"rank {other.rank} and rank {first.rank}"
        found.extend(_different_gradients(who, first.digests, other.digests))
        found.extend(_different_buckets(who, first.buckets, other.buckets))
        found.extend(_different_buckets(who, first.collectives, other.collectives))
    return found


def _different_gradients(who: str, ours: list[dict[str, str]], theirs: list[dict[str, str]]) -> list[str]:
    if len(ours) != len(theirs):
        return [f"{who} synchronized {len(theirs)} and {len(ours)} times"]
    for k, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        names = [name for name, digest in mine.items() if other[name] != digest]
        if names:
            return [f"law 2: after synchronization {k}, {who} have different bits in {', '.join(names)}"]
    return []


def _different_buckets(who: str, ours: Sequence[Sequence[object]], theirs: Sequence[Sequence[object]]) -> list[str]:
    for k, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        for a, b in itertools.zip_longest(other, mine):
            if a != b:
                return [f"law 1: in synchronization {k}, {who} differ in what they send: {a} and {b}"]
    return []


def _update(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-0.125)


def digest_of(gradient: Tensor | None) -> str:
    """Sixteen characters that differ where a gradient's bits, shape or dtype do."""
    if gradient is None:
        return "None".ljust(2 * _DIGEST_SIZE)
    gradient = gradient.detach().to_dense()
    plain = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    content = plain.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    digest = hashlib.blake2b(content, digest_size=_DIGEST_SIZE)
    digest.update(f"{gradient.dtype} {tuple(gradient.shape)}".encode())
    return digest.hexdigest()


def _distance(ours: Tensor, theirs: Tensor) -> float:
    if ours.shape != theirs.shape:
        return float("inf")
    if not ours.numel():
        return 0.0
    wide = torch.complex128 if ours.is_complex() else torch.float64
    return float((ours.to_dense().to(wide) - theirs.to_dense().to(wide)).abs().max())


def _largest(gradient: Tensor) -> float:
    return float(gradient.to_dense().abs().max()) if gradient.numel() else 0.0


def _dense_nbytes(module: nn.Module) -> dict[str, int]:
    """Bytes of each gradient by name, without sparse ones, of which only some rows are sent."""
    nbytes = {name: p.numel() * p.element_size() for name, p in module.named_parameters()}
    for name, owner in module.named_modules():
        if isinstance(owner, nn.Embedding) and owner.sparse:
            del nbytes[f"{name}.weight"]
    return nbytes


def _drift(dtypes: frozenset[torch.dtype], plugs: Plugs) -> float:
    if plugs.tolerance is not None:
        return max(_COARSEST, plugs.tolerance)
    return min(_COARSEST, _DRIFT * max(torch.finfo(dtype).eps for dtype in dtypes))
