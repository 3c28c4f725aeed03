"""Looks for NaN and infinity in this rank's gradients before they are sent, and names them on all ranks.

A look is a sum of each gradient, or one fused norm of many small ones, while these are in the cache: not finite where
one of its numbers is not. All the sums are looked at together before the vote, and only where one is not finite each
gradient, element by element, as a sum can overflow. Whether a rank has found something travels in the vote, so that
all ranks know of it before any average is handed over. Only where one has, they exchange which parameters these are.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

import torch

from ppe_ddp.errors import NonFiniteGradientError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor, nn

    from ppe_ddp.contracts import Probe
    from ppe_ddp.engine.groups import Groups
    from ppe_ddp.engine.negotiation import Negotiation

NON_FINITE = 2
"""The bit of a rank's status in the vote."""
_LARGE_BYTES = 16 << 10  # from this mean size on, sums are faster than the fused norm
_NAMED_RANKS = 4  # one exchange each
_NAMED = 5  # parameters of each


class FiniteCheck:
    """What is not finite in the gradients of one backward.

    Args:
        groups: Where the ranks communicate.
        names: Of all parameters.
        is_enabled: Whether to look at all.
    """

    def __init__(self, groups: Groups, names: Sequence[str], *, is_enabled: bool) -> None:
        self._is_enabled = is_enabled
        self._groups = groups
        self._names = names
        self._found: set[int] = set()
        self._looked: list[tuple[int, Tensor]] = []
        self._totals: list[Tensor] = []

    @property
    def status(self) -> int:
        """This rank's, for the vote."""
        self._decide()
        return NON_FINITE if self._found else 0

    def begin(self) -> None:
        """Forget the last backward."""
        self._found.clear()
        self._forget()

    def look(self, indices: Iterable[int], gradients: Iterable[Tensor | None]) -> None:
        """Look at the gradients of these parameters, which stay as they are until the vote. On a GPU the host waits."""
        if not self._is_enabled:
            return
        present = {i: _values(gradient) for i, gradient in zip(indices, gradients, strict=True) if gradient is not None}
        present = {i: values for i, values in present.items() if values.is_floating_point() or values.is_complex()}
        if not present:
            return
        self._looked += present.items()
        totals = _totals(list(present.values()))
        self._totals += totals
        if any(total.device.type != "cpu" for total in totals):  # the vote may be on another stream
            self._decide()

    def _decide(self) -> None:
        """Find out which of the gradients that were looked at are not finite."""
        by_device: dict[torch.device, list[Tensor]] = {}
        for total in self._totals:
            by_device.setdefault(total.device, []).append(total)
        if not all(bool(torch.stack(totals).sum().isfinite()) for totals in by_device.values()):
            self._found.update(i for i, values in self._looked if not bool(values.isfinite().all()))
        self._forget()

    def _forget(self) -> None:
        self._looked.clear()
        self._totals.clear()

    def is_fine_alone(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Look at ``.grad`` of all parameters of one rank alone; whether all is finite."""
        self.look(range(len(parameters)), [parameter.grad for parameter in parameters])
        return self.status == 0

    def error(
        self, negotiation: Negotiation, statuses: Sequence[int]
    ) -> Generator[Probe | None, None, NonFiniteGradientError]:
        """Exchange the names, as steps on all ranks, and make the error for them.

        Args:
            negotiation: Of the ranks.
            statuses: Of the ranks, as they have voted; one at least has :data:`NON_FINITE`.
        """
        ranks = [rank for rank, status in enumerate(statuses) if status & NON_FINITE]
        places = []
        for rank in ranks[:_NAMED_RANKS]:
            mask = bytearray(len(self._names))
            for i in self._found if rank == self._groups.rank else ():
                mask[i] = 1
            exchange = negotiation.start(mask, 0, is_vote=True)
            yield exchange.done
            places.append(self._place(rank, negotiation.finish(exchange, b"").mask))
        return self._error("; ".join(places), len(ranks) - len(places))

    def error_alone(self) -> NonFiniteGradientError:
        """The error of one rank alone, which has no others to exchange names with."""
        mask = bytes(i in self._found for i in range(len(self._names)))
        return self._error(self._place(0, mask), 0)

    def _place(self, rank: int, mask: bytes) -> str:
        names = [repr(name) for name, is_found in zip(self._names, mask, strict=True) if is_found]
        more = f" and {len(names) - _NAMED} more" if names[_NAMED:] else ""
        return f"rank {rank} in {', '.join(names[:_NAMED])}{more}"

    def _error(self, places: str, more: int) -> NonFiniteGradientError:
        others = f", and {more} more ranks" if more else ""
        return NonFiniteGradientError(
            f"NaN or infinity in local gradients, before they were averaged: {places}{others} (ranks of the "
            f"{self._groups.world_size} that average them). The gradients of this step are of no use: zero them, and "
            "look at the data, the learning rate or the loss scale of that rank"
        )


def _values(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _totals(gradients: list[Tensor]) -> Sequence[Tensor]:
    """Numbers of which one is not finite where one of a gradient is not, or where these are large."""
    with torch.no_grad():
        if sum(gradient.nbytes for gradient in gradients) >= _LARGE_BYTES * len(gradients):
            return [gradient.sum() for gradient in gradients]
        return torch._foreach_norm(gradients, 2.0)
