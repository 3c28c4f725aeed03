"""What a user may choose beside ppe's own arguments: torch's keywords, and a few of ours."""

from __future__ import annotations

import difflib
import logging
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger("ppe_ddp")

# Hints that torch needs and this library does not: accepted in silence, since nothing is lost.
_NEVER_NEEDED = frozenset(
    {
        "find_unused_parameters",
        "static_graph",
        "check_reduction",
        "skip_all_reduce_unused_params",
        "batched_grad_copy",
        "lazy_bucket_allocation",
    }
)
_PPE = frozenset({"broadcast_buffers", "negotiate_grads", "process_group", "reduce_function", "broadcast_function"})
# What a user of torch may have meant, and why it has no effect here.
_WITHOUT_EFFECT = {
    "dim": "inputs are not scattered",
    "output_device": "outputs stay where the module puts them",
    "delay_all_reduce_named_params": "buckets leave when their gradients are there",
    "param_to_hook_all_reduce": "buckets leave when their gradients are there",
    "mixed_precision": "use torch.autocast, or cast the module",
    "bucket_cap_mb_list": "use bucket_cap_mb",
    "forward_sync_buffers": "buffers are broadcast after backward; use broadcast_buffers=False to do without",
}


@dataclass(frozen=True)
class Options:
    """The choices of one wrapper.

    Attributes:
        bucket_cap_mb: Size of a bucket in MiB. Smaller ones leave earlier and leave less to wait for at the
            end; larger ones pay the latency of a message less often. None: 4, as measured on CPUs; on GPUs
            25, which is torch's.
        gradient_as_bucket_view: Let ``.grad`` be a view of the bucket: saves the copy back and its memory. One
            ``.grad`` that is kept keeps the memory of its bucket; it is never overwritten.
        init_sync: Compare parameters across ranks and broadcast those of rank 0 when wrapping. Without it,
            the user answers for both.
        device_ids: As torch has it: None, or the one device that the module is on.
        device_mesh: A 1-D ``DeviceMesh`` instead of ``process_group``.
        overlap: Communicate while backward is running. Without it, all of it comes after: slower, but
            easier to profile; results are the same.
        record_function: Add ``torch.profiler.record_function`` ranges for negotiation and buckets.
    """

    bucket_cap_mb: float | None = None
    gradient_as_bucket_view: bool = True
    init_sync: bool = True
    device_ids: Any = None
    device_mesh: Any = None
    overlap: bool = True
    record_function: bool = False

    @classmethod
    def parse(cls, keywords: dict[str, Any]) -> Options:
        """Take the keywords of a call apart.

        Raises:
            TypeError: A keyword that neither torch nor this library has; names the nearest one.
            ValueError: A value that cannot be meant.
        """
        known = {option.name for option in fields(cls)}
        own = {name: value for name, value in keywords.items() if name in known}
        for name, value in keywords.items():
            if name in known or name in _NEVER_NEEDED:
                continue
            if name not in _WITHOUT_EFFECT:
                raise TypeError(_unknown(name, known | _NEVER_NEEDED | _WITHOUT_EFFECT.keys()))
            if value is not None and not (name == "dim" and value == 0):
                logger.warning("ppe_ddp.DistributedDataParallel ignores %s: %s", name, _WITHOUT_EFFECT[name])
        options = cls(**own)
        if options.bucket_cap_mb is not None and not options.bucket_cap_mb > 0:
            raise ValueError(f"bucket_cap_mb must be positive (MiB), not {options.bucket_cap_mb!r}")
        return options


def _unknown(name: str, known: frozenset[str] | set[str]) -> str:
    near = difflib.get_close_matches(name, sorted(known | _PPE), n=1, cutoff=0.5)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    return f"DistributedDataParallel() got an unexpected keyword argument {name!r}{meant}"


def check_arguments(module: object, broadcast_buffers: object) -> None:
    """Refuse what is no module, and torch's positional ``device_ids`` in the place of ``broadcast_buffers``."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"DistributedDataParallel wraps an nn.Module, not {type(module).__name__}")
    if isinstance(broadcast_buffers, list | tuple | torch.device):
        raise TypeError(
            "the second argument of this DistributedDataParallel is broadcast_buffers (a bool), as in "
            f"pytorch-pfn-extras; pass device_ids={broadcast_buffers!r} by its name, or leave it out"
        )


def group_of(process_group: ProcessGroup | None, options: Options) -> ProcessGroup | None:
    """The process group that is named, directly or by a device mesh; None for the default group."""
    mesh = options.device_mesh
    if mesh is None:
        return process_group
    if process_group is not None:
        raise ValueError("give process_group or device_mesh, not both")
    if mesh.ndim != 1:
        raise ValueError(
            f"device_mesh must have one dimension, not {mesh.ndim}: pass the data-parallel part, mesh['dp']"
        )
    group: ProcessGroup = mesh.get_group(mesh_dim=0)
    return group


def check_device_ids(options: Options, device: torch.device | None) -> None:
    """Refuse ``device_ids`` that do not name the device of the module."""
    if not options.device_ids:
        return
    if len(options.device_ids) != 1:
        raise ValueError(f"device_ids must name one device, not {options.device_ids!r}: one process a device")
    named = options.device_ids[0]
    wanted = torch.device("cuda", named) if isinstance(named, int) else torch.device(named)
    if device is not None and device.type != "cpu" and wanted != device:
        raise ValueError(f"device_ids names {wanted}, but the module is on {device}: move it there first")
