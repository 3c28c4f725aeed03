"""Reads, takes and sets the ``.grad`` of the parameters."""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from typing import TYPE_CHECKING

import torch

from ppe_ddp.engine.bucket_buffers import BucketBuffers
from ppe_ddp.engine.distributed_tensors import DistributedGradients, local_tensor
from ppe_ddp.engine.zero.sharded_gradient import ShardedGradient, local_of, take_local
from ppe_ddp.scaling import scale
from ppe_ddp.torch_internals import storage_users

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor, nn

    from ppe_ddp.engine.bucket_allocator import Allocator
    from ppe_ddp.engine.module_state import ModuleState
    from ppe_ddp.engine.streams import GradientStreams


class Gradients:
    """Owns the buffers and all access to ``.grad``.

    Args:
        module_state: The parameters.
        allocate: Makes the memory of buckets.
        streams: Those that gradients arrive on; None on CPUs.
    """

    def __init__(self, module_state: ModuleState, allocate: Allocator, streams: GradientStreams | None) -> None:
        self._parameters: Sequence[nn.Parameter] = module_state.parameters
        self._specs = module_state.specs
        self._streams = streams
        distributed = DistributedGradients(module_state.distributed, module_state.names)
        # None where there are none: asked for every gradient
        self._distributed = distributed if distributed else None
        self.buffers = BucketBuffers(allocate)
        self.shared: list[int] = []
        """Parameters whose gradients were one piece of memory when the last backward began."""
        self.stays_in_place = False
        """Whether a gradient then lay in memory that the user holds as well: the average is to be written there."""

    def existing(self, reached: bytes | bytearray) -> bytes:
        """One byte a parameter: whether it is in ``reached``, or has a gradient already that is not averaged shards."""
        mask = bytearray(reached)
        grads = [(i, grad) for i, p in enumerate(self._parameters) if (grad := p.grad) is not None]
        held = [(i, local) for i, grad in grads if (local := local_of(grad)) is not None]
        if self._distributed is not None:
            held = [(i, local_tensor(gradient)) for i, gradient in held]
        self.shared, self.stays_in_place = [], False
        if held:
            self._find_shared_memory(held)
        for i, _ in held:
            mask[i] = 1
        return bytes(mask)

    def _find_shared_memory(self, held: list[tuple[int, Tensor]]) -> None:
        """Find out which gradients from before this backward share their memory, and with whom."""
        dense = [(i, gradient) for i, gradient in held if not gradient.is_sparse]
        addresses = [gradient.data_ptr() for _, gradient in dense]
        bounds = self.buffers.bounds()
        others = [k for k, address in enumerate(addresses) if address and not bisect(bounds, address) % 2]
        self.stays_in_place = any(storage_users(dense[k][1]) > 1 for k in others)
        if len(set(addresses)) < len(addresses):
            counts = Counter(filter(None, addresses))  # without elements there is no address
            self.shared = [i for (i, _), address in zip(dense, addresses, strict=True) if counts[address] > 1]

    def take(self, indices: Sequence[int]) -> list[Tensor | None]:
        """Take gradients out of ``.grad``, which is set to None (averaged shards stay); None where there is none."""
        parameters = [self._parameters[i] for i in indices]
        taken = [parameter.grad for parameter in parameters]
        if self._distributed is not None:
            taken = [g if g is None else self._distributed.local(i, g) for i, g in zip(indices, taken, strict=True)]
        if ShardedGradient in set(map(type, taken)):
            taken = list(map(take_local, parameters))
        else:
            for parameter in parameters:
                parameter.grad = None
        if self.shared:  # averages may differ, and each needs a place of its own
            pairs = zip(indices, taken, strict=True)
            taken = [g.clone() if g is not None and i in self.shared else g for i, g in pairs]
        if self._streams is not None:
            self._streams.wait_for_gradients(taken)
        if any([gradient is not None and gradient.is_sparse for gradient in taken]):
            for k, i in enumerate(indices):
                gradient = taken[k]
                if gradient is not None and gradient.is_sparse and not self._specs[i].sparse:
                    taken[k] = gradient.to_dense()
        return taken

    def hand_over(self, indices: Sequence[int], gradients: list[Tensor], factor: float = 1.0) -> None:
        """Set ``.grad`` to these averages; add them where there is a gradient already."""
        parameters = self._parameters
        for i, gradient in zip(indices, gradients, strict=True):
            if factor != 1.0:
                scale(gradient, gradient, factor)
            if self._distributed is not None:
                gradient = self._distributed.whole(i, gradient)
            parameter = parameters[i]
            there = parameter.grad
            # Shards are those of an optimizer that another wrapper had: this one hands over all of it.
            if there is None or type(there) is ShardedGradient:
                parameter.grad = gradient
            else:
                there.add_(gradient)

    @torch.no_grad()
    def put_back(self, gradients: Iterable[tuple[int, Tensor]]) -> None:
        """Put this rank's own gradients back into ``.grad``; add what has arrived there since."""
        for i, gradient in gradients:
            if self._distributed is not None:
                gradient = self._distributed.whole(i, gradient)
            parameter = self._parameters[i]
            there = parameter.grad
            if there is None:
                parameter.grad = gradient
            elif type(there) is ShardedGradient:
                there.add_(gradient)
            elif gradient.is_sparse:  # torch adds sparse to dense, not dense to sparse
                parameter.grad = there + gradient
            else:
                parameter.grad = gradient + there
