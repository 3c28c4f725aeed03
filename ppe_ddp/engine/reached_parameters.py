"""Asks autograd, when a backward begins, which parameters that backward will accumulate into."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from torch.autograd.graph import get_gradient_edge

from ppe_ddp.errors import TorchChangedError
from ppe_ddp.torch_internals import current_node, node_is_executed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn
    from torch.autograd.graph import Node


class ReachedParameters:
    """Finds the parameters that the running backward will accumulate into, by their autograd nodes."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._nodes: dict[int, Node] = {}
        self._is_executed = node_is_executed()
        self.refresh(range(len(parameters)))

    def refresh(self, indices: Iterable[int]) -> None:
        """Look up the nodes of these parameters. A cast, even there and back, gives a parameter a new one."""
        with torch.enable_grad():
            for i in indices:
                if self._parameters[i].requires_grad:
                    # Holding a node keeps it the parameter's own: autograd itself holds it weakly.
                    self._nodes[i] = get_gradient_edge(self._parameters[i]).node

    def indices(self, *, has_accumulated: bool = False) -> list[int]:
        """The parameters that the graph task running on this thread will reach.

        Exact, except for those that it reaches through a graph task of its own (reentrant checkpoints), or by a node
        that a parameter had before it was cast. Empty for ``autograd.grad``, which accumulates nothing.

        Args:
            has_accumulated: Whether the graph task has accumulated a gradient already.

        Raises:
            TorchChangedError: It has, and autograd refuses to answer, which it does to ``autograd.grad`` alone.
        """
        is_executed = self._is_executed
        try:
            return [i for i, node in self._nodes.items() if is_executed(node)]
        except RuntimeError as error:
            if not has_accumulated:
                return []  # autograd.grad on the parameters themselves
            raise TorchChangedError(
                "node_is_executed: this version of torch does not tell in a backward which parameters it will reach "
                f"({error}); use a version that CONTRIBUTING.md names, and see `python -m ppe_ddp doctor`"
            ) from error

    def accumulates(self) -> bool:
        """Whether the graph task accumulates gradients below the node that it executes now; ``autograd.grad`` does not.

        Asked of the first leaf that is found there.
        """
        below, seen = [current_node()], set()
        while below:
            node = below.pop()
            if node is None or node in seen:
                continue
            if hasattr(node, "variable"):
                with suppress(RuntimeError):  # autograd.grad of this leaf
                    return self._is_executed(node)
                return False
            seen.add(node)
            below += [after for after, _ in node.next_functions]
        return False
