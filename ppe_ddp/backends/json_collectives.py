"""Collectives of plain values, sent as JSON, which is only data.

torch's object collectives send pickles, and loading a pickle may run any code that the sender has named in it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch import distributed as dist

from ppe_ddp.backends.group_internals import device_types

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def all_gather_json(value: Any, group: ProcessGroup) -> list[Any]:
    """Get the value of every rank, by rank; all ranks of ``group`` must call this together.

    A value is one that JSON can encode: strings, numbers, booleans, None, lists, and dictionaries with string keys.
    Tuples come back as lists. Any other value raises TypeError on this rank alone, before anything is sent.
    """
    own = _encoded(value)
    device, size = _device_of(group), dist.get_world_size(group)
    length = torch.tensor([own.numel()], device=device)
    lengths = [torch.empty_like(length) for _ in range(size)]
    dist.all_gather(lengths, length, group=group)
    counts = [int(count) for count in lengths]
    # Pad to the longest text: an all-gather takes parts of equal size.
    padded = torch.zeros(max(counts), dtype=torch.uint8, device=device)
    padded[: own.numel()] = own
    texts = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(texts, padded, group=group)
    return [_decoded(text[:count]) for text, count in zip(texts, counts, strict=True)]


def broadcast_json(value: Any, source: int, group: ProcessGroup) -> Any:
    """Get the value of the global rank ``source``; all ranks of ``group`` must call this together.

    The values are those of :func:`all_gather_json`. Other ranks' ``value`` is ignored.
    """
    device, is_source = _device_of(group), dist.get_rank() == source
    content = _encoded(value).to(device) if is_source else torch.empty(0, dtype=torch.uint8, device=device)
    length = torch.tensor([content.numel()], device=device)
    dist.broadcast(length, source, group=group)
    if not is_source:
        content = torch.empty(int(length), dtype=torch.uint8, device=device)
    dist.broadcast(content, source, group=group)
    return _decoded(content)


def _encoded(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decoded(content: Tensor) -> Any:
    return json.loads(content.cpu().numpy().tobytes())


def _device_of(group: ProcessGroup) -> torch.device:
    """The device for tensors of ``group``: the CPU if it serves CPUs."""
    kinds = device_types(group)
    if "cpu" in kinds or not kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.accelerator.current_device_index())
