"""Compares what the ranks have in their parameters and buffers, bit by bit: on demand, as it reads all of them."""

from __future__ import annotations

import ctypes
import hashlib
from typing import TYPE_CHECKING

import torch
from torch import distributed as dist

from ppe_ddp.engine.module import local_tensor
from ppe_ddp.errors import DisagreementError

if TYPE_CHECKING:
    from torch import Tensor

    from ppe_ddp.engine.groups import Groups
    from ppe_ddp.engine.module import ModuleState
    from ppe_ddp.engine.negotiation import Negotiation

_NAMED = 5  # of those that differ, in a message


def check_in_sync(negotiation: Negotiation, module_state: ModuleState, groups: Groups) -> None:
    """Compare the bits of the parameters of ``module_state``, and of its buffers where the ranks must agree on them.

    Eight bytes a tensor are sent. All ranks must call this together.

    Raises:
        DisagreementError: On every rank, with the same text; names what differs and on which ranks.
    """
    negotiation.check()  # else the messages might differ in length, of which gloo can end the process
    tensors: dict[str, Tensor] = dict(zip(module_state.names, module_state.parameters, strict=True))
    if negotiation.buffers():
        tensors.update(module_state.buffers())
    own = torch.tensor([_digest(tensor) for tensor in tensors.values()], dtype=torch.int64)
    digests = [torch.empty_like(own) for _ in range(groups.world_size)]
    dist.all_gather(digests, own, group=groups.control)
    differing = [digest != digests[0] for digest in digests]
    ranks = [rank for rank, differs in enumerate(differing) if differs.any()]
    if not ranks:
        return
    anywhere = torch.stack(differing).any(dim=0).tolist()
    names = [name for name, differs in zip(tensors, anywhere, strict=True) if differs]
    some = ", ".join(map(repr, names[:_NAMED])) + (f" and {len(names) - _NAMED} more" if names[_NAMED:] else "")
    raise DisagreementError(
        f"rank{'s' if ranks[1:] else ''} {', '.join(map(str, ranks))} and rank 0 have other values in {len(names)} of "
        f"{len(tensors)} parameters and buffers: {some}. Load a checkpoint on every rank, or on rank 0 before the "
        "module is wrapped, and change parameters on all ranks alike"
    )


def _digest(tensor: Tensor) -> int:
    """A number of 64 bits that tells of a difference in any bit."""
    here = local_tensor(tensor).detach().cpu().contiguous()
    memory = (ctypes.c_char * here.nbytes).from_address(here.data_ptr()) if here.nbytes else b""
    return int.from_bytes(hashlib.blake2b(memory, digest_size=8).digest(), "little", signed=True)
