"""One bucket of a plan, kept as long as the plan, and its states in one backward.

    hold        takes this rank's gradients; .grad is None meanwhile
    launch      packs them into other memory, and starts the reduction of that
    finish      waits for the result
    averages    after all buckets have succeeded: one average a member
    put_back    after a failure: gives this rank's gradients back, as they were
    release     drops what belongs to one backward

Names, parameters and layout are computed once. Buffers are borrowed for one backward only, because averages may be
views of them: another backward may use the same plan while the averages of the first are alive.

A gradient belongs to its bucket while that lasts, and ``.grad`` is None meanwhile: a gradient that arrives in the
meantime (a repair) makes a ``.grad`` of its own instead of being added to a message that is under way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ppe_ddp.contracts import probe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from ppe_ddp.contracts import Probe, Waitable
    from ppe_ddp.engine.bucket_plan import BucketPlan, ParameterSpec
    from ppe_ddp.engine.completion import Steps
    from ppe_ddp.engine.groups import Groups
    from ppe_ddp.engine.reduction import Reduction


@dataclass(frozen=True, eq=False)
class BucketContext:
    """The arguments that the buckets of all plans have in common.

    Attributes:
        specs: Of all parameters of the module.
        parameters: All of them.
        groups: Where to communicate.
        reduction: Reduces a bucket.
    """

    specs: Sequence[ParameterSpec]
    parameters: Sequence[nn.Parameter]
    groups: Groups
    reduction: Reduction


class Bucket(ABC):
    """A bucket of gradients that are reduced together.

    Args:
        plan: What it is.
        context: What all buckets have in common.
        present: One byte a parameter: whether some rank has its gradient; None where that is so for all members.

    Attributes:
        plan: The same.
        specs: Those of the members.
        parameters: The members.
        names: Theirs.
        expected: The members of which some rank has a gradient.
        is_exact: Whether those are all members, as in any plan but one of fixed buckets.
        gradients: This rank's gradients, one a member, or None; empty between backwards. Nobody writes into them
            before :meth:`averages`.
        nbytes: What this rank sends.
        packed_at: When the gradients of the last launch had been packed, by ``perf_counter_ns()``; 0 if nothing is.
    """

    def __init__(self, plan: BucketPlan, context: BucketContext, present: bytes | None = None) -> None:
        members = plan.members
        self.plan = plan
        self.specs = [context.specs[i] for i in members]
        self.parameters = [context.parameters[i] for i in members]
        self.names = tuple(spec.name for spec in self.specs)
        self.nbytes = plan.nbytes
        self.packed_at = 0
        self.expected = members if present is None else tuple(i for i in members if present[i])
        self.is_exact = len(self.expected) == len(members)
        self.gradients: list[Tensor | None] = []
        self._views = False
        self._pending: Waitable | None = None

    def hold(self, gradients: list[Tensor | None], *, views: bool = False) -> None:
        """Take this rank's gradients, to be reduced by :meth:`launch`.

        Args:
            gradients: One for each of :attr:`expected`: what this rank has, or None.
            views: Whether the averages may be views of the memory that they are packed into.
        """
        assert not self.gradients, f"bucket {self.plan.index} is under way already"
        if not self.is_exact:
            found = dict(zip(self.expected, gradients, strict=True))
            gradients = [found.get(i) for i in self.plan.members]
        self.gradients = gradients
        self._views = views

    def expected_of(self, averages: list[Tensor]) -> list[Tensor]:
        """The averages of the parameters in :attr:`expected`, out of one average a member."""
        expected = set(self.expected)
        return [average for i, average in zip(self.plan.members, averages, strict=True) if i in expected]

    @abstractmethod
    def launch(self, *, is_last: bool) -> None:
        """Pack the gradients and start to reduce them.

        Args:
            is_last: Whether no bucket that a function or hook gets comes after this one.
        """

    @abstractmethod
    def finish(self) -> Steps:
        """Wait for the result."""

    @abstractmethod
    def averages(self) -> list[Tensor]:
        """One average a member, each the tensor that ``.grad`` is set to: perhaps this rank's own gradient."""

    @property
    def pending(self) -> Waitable | None:
        """The reduction that was started and not waited for."""
        return self._pending

    @property
    def is_under_way(self) -> bool:
        """Whether a reduction was started that was not waited for."""
        return self._pending is not None

    def probe(self) -> Probe | None:
        """A probe of the pending reduction; None where it cannot be asked without waiting."""
        return probe(self._pending)

    def is_complete(self) -> bool:
        """Whether no reduction of it is under way any more."""
        is_done = self.probe()
        return not self.is_under_way or (is_done is not None and bool(is_done()))

    def check(self) -> None:  # noqa: B027  # most cannot know
        """Raise the error of the reduction, if it is known to have failed."""

    def wait(self) -> None:  # noqa: B027  # only a function of the user's needs it
        """Wait for the pending reduction; :meth:`finish` takes its result."""

    def give_back(self) -> list[tuple[int, Tensor]]:
        """This rank's gradients as they were, by parameter index; the reduction goes on for the other ranks."""
        pairs = zip(self.plan.members, self.gradients, strict=bool(self.gradients))
        kept = [(i, gradient) for i, gradient in pairs if gradient is not None]
        self.gradients = [None] * len(self.gradients)
        return kept

    def put_back(self) -> list[tuple[int, Tensor]]:
        """Abandon the pending reduction: this rank's gradients as they were, by parameter index."""
        kept = self.give_back()
        self.release()
        return kept

    def release(self) -> None:
        """Drop what belongs to one backward."""
        self.gradients = []
        self._pending = None
