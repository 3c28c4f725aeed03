"""Which slice of a node's ranks each parameter belongs to, where compressors exchange gradients between nodes. Pure.

Whole parameters, and not parts of them: a method does the same with a parameter as it would with one rank a node (a
matrix that is cut is another matrix to PowerSGD, with more to send), and what it remembers of it lies on one rank of
each node, by its name. The link is that of the node, as busy whoever feeds it; the arithmetic is balanced over the
module, not over each bucket.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ppe_ddp.engine.bucket_plan import ParameterSpec

# Below this part of the mean size a parameter goes with the one before it: every range of a bucket costs some calls.
_SMALL = 1 / 8


class SliceOwners:
    """The slices of parameters by name: the same on all ranks, as long as they see the same modules in the same order.

    A parameter stays with its slice whatever becomes of the others, since what is remembered of it lies there.
    """

    def __init__(self) -> None:
        self._slices: dict[str, int] = {}
        self._numels: dict[str, int] = {}

    def add(self, specs: Sequence[ParameterSpec], slices: int) -> None:
        """Give each parameter that has no slice yet the one with the fewest elements, of so many slices."""
        loads = [0] * slices
        for name, index in self._slices.items():
            if index < slices:
                loads[index] += self._numels.get(name, 0)
        small = _SMALL * sum(spec.numel for spec in specs) / max(1, len(specs))
        before = 0
        for spec in specs:
            known = self._slices.get(spec.name)
            if known is None or known >= slices:
                known = before if spec.numel < small else loads.index(min(loads))
                self._slices[spec.name] = known
                loads[known] += spec.numel
            self._numels[spec.name] = spec.numel
            before = known

    def of(self, name: str) -> int:
        """The slice of a parameter."""
        return self._slices.get(name, 0)

    def state_dict(self) -> dict[str, int]:
        """A copy."""
        return dict(self._slices)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from what :meth:`state_dict` gave."""
        self._slices = dict(state)
