"""Masks that tell on which node each gradient exists, where that is one only: by the same MAX over the ranks. Pure.

    a rank of node k, of n nodes, sends     1 + k, n - k    for a gradient that it has
                                            0, 0            for one that it lacks
    the maxima of all ranks are             0, 0            no rank has it
                                            1 + k, n - k    only ranks of node k have it
                                            a, b            several nodes have it: a + b > n + 1

Such a gradient need not be summed over the nodes: its own sends it, which is half the traffic.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING, Any

import torch

from ppe_ddp.backends.group_internals import backend_for, device_types

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup

_MOST_NODES = 254  # that a byte can tell from one another
_IS_PRESENT = bytes([0, *[1] * 255])


@dataclass(frozen=True)
class NodeMasks:
    """How the ranks of one node write masks, and all ranks read them.

    Attributes:
        node: The number of this rank's node.
        count: How many nodes there are.
    """

    node: int
    count: int

    def written(self, local: bytes | bytearray) -> tuple[bytes, bytes]:
        """The two messages for a mask of one byte a parameter, non-zero where this rank has the gradient."""
        numbers = (1 + self.node, self.count - self.node)
        first, second = (local.translate(bytes([0, *[number] * 255])) for number in numbers)
        return bytes(first), bytes(second)

    def read(self, first: bytes, second: bytes, sizes: Sequence[int]) -> tuple[bytes, bytes]:
        """The agreed mask, and of each parameter 1 + the only node that has its gradient, else 0.

        Args:
            first: The maxima of the first message.
            second: Those of the second.
            sizes: Of the gradients, in bytes; 0 where the node makes no difference.
        """
        present = first.translate(_IS_PRESENT)
        only = self.count + 1
        nodes = bytes(a if a + b == only and size else 0 for a, b, size in zip(first, second, sizes, strict=True))
        return present, nodes if self._gains(nodes, sizes) else bytes(len(nodes))

    def _gains(self, nodes: bytes, sizes: Sequence[int]) -> bool:
        """Whether the links are done sooner than with sums: a broadcast is a tree, whose root sends several times."""
        each = [sum(compress(sizes, nodes.translate(_only(number)))) for number in range(1, self.count + 1)]
        times = (self.count - 1).bit_length()
        return 0 < max(each) * times * self.count <= 2 * (self.count - 1) * sum(each)


def node_masks(group: ProcessGroup, rank: int) -> NodeMasks | None:
    """The masks for the nodes of ``group``; None where it sums all alike. The same on all ranks."""
    backend: Any = backend_for(group, torch.device("cpu")) if "cpu" in device_types(group) else None
    nodes: Sequence[Sequence[int]] = backend.nodes if hasattr(backend, "sum_of_node") else ()
    if not 1 < len(nodes) <= _MOST_NODES:
        return None
    return NodeMasks(next(number for number, ranks in enumerate(nodes) if rank in ranks), len(nodes))


def _only(number: int) -> bytes:
    return bytes(int(value == number) for value in range(256))
