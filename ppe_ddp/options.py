"""The wrapper's options in addition to pytorch-pfn-extras' arguments: torch's keywords, and our own."""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from numbers import Real
from typing import Any, Literal, TypedDict

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ppe_ddp.contracts import MixedPrecision
from ppe_ddp.errors import did_you_mean
from ppe_ddp.functions import declares, name_of
from ppe_ddp.torch_internals import fits

logger = logging.getLogger("ppe_ddp")


class IgnoredByUs(TypedDict, total=False):
    """Keywords of torch's wrapper that are accepted without an effect; type checkers refuse all others."""

    find_unused_parameters: bool
    static_graph: bool
    check_reduction: bool
    skip_all_reduce_unused_params: bool
    batched_grad_copy: bool
    lazy_bucket_allocation: bool
    output_device: int | torch.device | None
    dim: int
    delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None
    param_to_hook_all_reduce: nn.Parameter | None


# Those that a user may expect to have an effect, and why they have none. The others are hints that only torch needs.
_WITHOUT_EFFECT = {
    "dim": "inputs are not scattered",
    "output_device": "outputs stay where the module puts them",
    "delay_all_reduce_named_params": "buckets are launched when their gradients are there",
    "param_to_hook_all_reduce": "buckets are launched when their gradients are there",
}


@dataclass(frozen=True)
class Options:
    """The options of one wrapper.

    Attributes:
        bucket_cap_mb: The size of a bucket in MiB. Smaller buckets are launched earlier, and leave less to wait for at
            the end; larger ones are fewer messages. None: 4 at first, and 25, as in torch, on GPUs. On CPUs, without
            hooks, functions of the user's and a sharded optimizer, the ranks may agree on another size after ten steps
            if that makes a step shorter, by the time of backward, the latency and speed of the group, and the cores
            that gloo's threads need; sums may then be rounded in another way. Several numbers are the sizes of the
            buckets in launch order, the last for all further ones, such as for a small first bucket that is launched
            early. ``bucket_cap_mb_list``, torch's keyword for several, takes precedence.
        gradient_as_bucket_view: Make ``.grad`` a view of the bucket, which saves a copy and its memory. A ``.grad``
            that is kept keeps the memory of its whole bucket, and is never overwritten.
        init_sync: Compare parameters across ranks and broadcast those of rank 0 when wrapping. Without it the user must
            make sure that they are equal.
        device_ids: None, or the one device of the module, as in torch.
        device_mesh: A 1-D ``DeviceMesh`` instead of ``process_group``.
        mixed_precision: torch's ``torch.nn.parallel.distributed._MixedPrecision``: compute in ``param_dtype``, reduce
            gradients in ``reduce_dtype``; parameters and ``.grad`` keep their own dtype.
        forward_sync_buffers: torch's name for ``broadcast_buffers``, which it overrides if it is not None.
        overlap: Communicate while backward is running. False: communicate after it, which is slower but easier to
            profile; results are the same.
        check_for_nan_in_grad: Look for NaN and infinity in this rank's gradients before they are sent, which takes half
            a millisecond for 32 MB. If a rank finds some, all raise
            :class:`~ppe_ddp.errors.NonFiniteGradientError`, which names ranks and parameters, and ``.grad`` is what
            each has computed. With ``"skip"`` they log it instead, and no parameter has a gradient in this step on any
            rank. On a GPU the host waits for the gradients. Under ``LocalSGD`` and ``DiLoCo`` each rank does this
            by itself, for its own step, and clears its gradients.
        check_drift: Compare the bits of the ranks' parameters, a hundredth of their memory in each synchronized
            backward. If they differ, a warning on rank 0 and on the ranks that differ names ranks and parameters. With
            ``"raise"`` the backward raises :class:`~ppe_ddp.errors.DisagreementError` on every rank, with the averages
            in ``.grad``. Buffers are not compared.
        record_function: Add ``torch.profiler.record_function`` ranges for negotiation and buckets.
        average_where_used: Divide by the number of ranks that have a gradient (``.grad`` is not None before it is
            synchronized) instead of all, such as for an expert or a head that only some ranks use. True for all
            parameters, or shell patterns of names in the wrapped module (``["experts.*"]``). With
            :func:`ppe_ddp.weigh` it is the weighted mean over those ranks. A message gets a bit more for each of these
            parameters and each rank.
        shared_memory: Sum CPU gradients in memory that the ranks of a node share, if the group is over gloo. If it
            cannot be used, all ranks use gloo alone, and each warns once of the reason.

    Raises:
        ValueError: A value is out of range.
        TypeError: ``average_where_used`` is neither a bool nor patterns.
    """

    bucket_cap_mb: float | Sequence[float] | None = None
    gradient_as_bucket_view: bool = True
    init_sync: bool = True
    device_ids: Sequence[int | str | torch.device] | None = None
    device_mesh: DeviceMesh | None = None
    mixed_precision: MixedPrecision | None = None
    forward_sync_buffers: bool = True
    overlap: bool = True
    record_function: bool = False
    check_for_nan_in_grad: bool | Literal["skip"] = False
    check_drift: bool | Literal["raise"] = True
    average_where_used: bool | str | Sequence[str] = False
    shared_memory: bool = True

    def __post_init__(self) -> None:
        for name in ("bucket_cap_mb", "average_where_used"):
            if isinstance(given := getattr(self, name), Iterator):  # it can be read but once
                object.__setattr__(self, name, tuple(given))
        caps = self.bucket_caps_mb
        if self.check_for_nan_in_grad not in (True, False, "skip"):
            raise ValueError(f'check_for_nan_in_grad is True, False or "skip", not {self.check_for_nan_in_grad!r}')
        if self.check_drift not in (True, False, "raise"):
            raise ValueError(f'check_drift is True, False or "raise", not {self.check_drift!r}')
        patterns = self.average_where_used
        are_names = isinstance(patterns, Iterable) and all(isinstance(one, str) for one in patterns)
        if not (isinstance(patterns, bool) or are_names):
            raise TypeError(f"average_where_used is True or patterns of names of parameters, not {patterns!r}")
        if caps is not None and not (caps and all(isinstance(cap, Real) and cap > 0 for cap in caps)):
            raise ValueError(f"bucket_cap_mb is a number of MiB above zero, or several, not {self.bucket_cap_mb!r}")

    @property
    def bucket_caps_mb(self) -> tuple[float, ...] | None:
        """The sizes of buckets in MiB, in launch order, the last for all further ones; None to choose them."""
        cap = self.bucket_cap_mb
        if cap is None:
            return None
        return tuple(cap) if isinstance(cap, Iterable) else (cap,)

    def group(self, process_group: ProcessGroup | None) -> ProcessGroup | None:
        """The process group that is named, directly or by the device mesh; None for the default group."""
        mesh = self.device_mesh
        if mesh is None:
            return process_group
        if process_group is not None:
            raise ValueError("give process_group or device_mesh, not both")
        if mesh.ndim != 1:
            raise ValueError(
                f"device_mesh must have one dimension, not {mesh.ndim}: pass the data-parallel part, mesh['dp']"
            )
        return mesh.get_group(mesh_dim=0)

    @property
    def where_used(self) -> bool | tuple[str, ...]:
        """``average_where_used`` as a bool, or sorted patterns."""
        patterns = self.average_where_used
        if isinstance(patterns, bool):
            return patterns
        return tuple(sorted({patterns} if isinstance(patterns, str) else set(patterns)))

    def check_names(self, names: Sequence[str]) -> None:
        """Refuse a pattern in ``average_where_used`` that fits none of these names of parameters."""
        patterns = self.where_used
        for pattern in () if isinstance(patterns, bool) else patterns:
            if not any(fits(name, pattern) for name in names):
                near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.0)
                raise ValueError(
                    f"average_where_used: no name of a parameter fits {pattern!r} (the nearest: {', '.join(near)}); "
                    f"for all of a submodule write {pattern.split('.')[0] + '.*'!r}"
                )

    def check_kept(self, names: Iterable[str]) -> None:
        """Refuse to keep what is not sent of these parameters, if one is averaged over the ranks that have used it."""
        patterns = ("*",) if self.where_used is True else self.where_used or ()
        for name, pattern in product(names, patterns):
            if fits(name, pattern):
                raise ValueError(
                    f"parameter {name!r} has average_where_used, and ErrorFeedback adds to it what earlier steps have "
                    "left, in which other ranks may have used it. Compress these parameters without ErrorFeedback: "
                    f"ByParameter({{{pattern!r}: Uncompressed()}}, otherwise=...)"
                )

    def check_device(self, device: torch.device | None) -> None:
        """Refuse a module that has no values yet, and ``device_ids`` that do not name its ``device``."""
        if self.init_sync and dist.is_initialized() and device is not None and device.type == "meta":
            raise ValueError(
                "the module is on the meta device, so that its parameters have no values: call "
                "module.to_empty(device=...), and initialize or load them, before wrapping it"
            )
        if not self.device_ids:
            return
        if len(self.device_ids) != 1:
            raise ValueError(f"device_ids must name one device, not {self.device_ids!r}: one process a device")
        named = self.device_ids[0]
        wanted = torch.device("cuda", named) if isinstance(named, int) else torch.device(named)
        is_other = device is not None and wanted not in (device, torch.device(device.type))  # as the current one
        if device is not None and device.type != "cpu" and is_other:
            raise ValueError(f"device_ids names {wanted}, but the module is on {device}: move it there first")


def check_ignored(ignored: Mapping[str, Any], call: Callable[..., None]) -> None:
    """Warn of keywords without an effect, and refuse those that neither torch's wrapper nor ``call`` has."""
    accepted = IgnoredByUs.__annotations__
    for name, value in ignored.items():
        if name not in accepted:
            known = {*inspect.signature(call).parameters, *accepted} - {"self", "ignored"}
            raise TypeError(unknown_keyword(name, known))
        if name in _WITHOUT_EFFECT and value is not None and not (name == "dim" and value == 0):
            logger.warning("ppe_ddp.DistributedDataParallel ignores %s: %s", name, _WITHOUT_EFFECT[name])


def unknown_keyword(name: str, known: set[str]) -> str:
    """The message for a keyword that is none of ``known``."""
    return f"DistributedDataParallel() got an unexpected keyword argument {name!r}{did_you_mean(name, known)}"


def check_arguments(
    module: object,
    broadcast_buffers: object,
    process_group: object,
    reduce_function: object,
    broadcast_function: object,
) -> None:
    """Refuse what cannot be wrapped or called, and torch's ``device_ids`` in the place of ``broadcast_buffers``."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"DistributedDataParallel wraps an nn.Module, not {type(module).__name__}")
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise TypeError(
                f"{f'submodule {name!r}' if name else 'the module'} was made by torch.jit, whose tables are in "
                "C++, where this library cannot see changes: wrap the module as it was, or keep a part that is not "
                "trained out of the module, as in a list"
            )
    for title, function, arguments in (
        ("reduce_function", reduce_function, ("bucket", "group")),
        ("broadcast_function", broadcast_function, ("tensors", "group")),
    ):
        if function is not None:
            check_call(title, function, arguments)
            declares(function, "takes_divided")  # refuses one that was copied
    if process_group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"rank {dist.get_rank()} is not in this process_group (new_group() has given it NON_GROUP_MEMBER): wrap "
            "the module on the ranks of the group only"
        )
    if isinstance(broadcast_buffers, list | tuple | torch.device):
        raise TypeError(
            "the second argument of this DistributedDataParallel is broadcast_buffers (a bool), as in "
            f"pytorch-pfn-extras; pass device_ids={broadcast_buffers!r} by its name, or leave it out"
        )


def check_call(title: str, function: object, arguments: Sequence[str]) -> None:
    """Refuse what cannot be called with ``arguments`` by position, unless it is a C function without a signature."""
    wanted = f"{title}({', '.join(arguments)})"
    if not callable(function):
        raise TypeError(f"{title} must be a function that can be called as {wanted}, not {type(function).__name__}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise TypeError(f"{name_of(function)}{signature} will be called as {wanted}, and cannot be: {error}") from None
