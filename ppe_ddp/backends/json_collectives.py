"""Collectives of plain values, sent as JSON, and values as bytes or text that is only data.

torch's object collectives send pickles, and loading a pickle may run any code that the sender has named in it.
"""

from __future__ import annotations

import io
import json
import warnings
from base64 import b64decode, b64encode
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import ProcessGroup
from torch.serialization import get_unsafe_globals_in_checkpoint

from ppe_ddp.backends.group_internals import device_types


def all_gather_json(value: Any, group: ProcessGroup) -> list[Any]:
    """Get the value of every rank, by rank; all ranks of ``group`` must call this together.

    A value is one that JSON can encode: strings, numbers, booleans, None, lists, and dictionaries with string keys.
    Tuples come back as lists. Any other value raises TypeError on this rank alone, before anything is sent.
    """
    own = _encoded(value)
    device, size = _device_of(group), dist.get_world_size(group)
    lengths = list(torch.empty(size, 1, dtype=torch.int64, device=device))
    dist.all_gather(lengths, torch.tensor([own.numel()], device=device), group=group)
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


def dump_plain(value: Any) -> bytes:
    """The bytes of a value that ``torch.load(weights_only=True)`` can read; :func:`load_plain` gives the value back.

    TypeError, which names the classes, if loading the value would run code, or if it cannot be saved.
    """
    content = io.BytesIO()
    try:
        torch.save(value, content)
    except Exception as error:
        raise TypeError(f"it is a {type(value).__name__}, which cannot be saved: {error}") from error
    if not isinstance(value, str | int | float | None):  # these hold no other classes; looking takes time
        content.seek(0)
        unsafe = get_unsafe_globals_in_checkpoint(content)
        if unsafe:
            raise TypeError(
                f"it is a {type(value).__name__} with {', '.join(sorted(unsafe))}, and loading that would run code: "
                "keep tensors and plain values there, or allow the class on every rank by "
                "torch.serialization.add_safe_globals"
            )
    return content.getvalue()


def load_plain(content: bytes) -> Any:
    """The value of :func:`dump_plain`, its tensors on the CPU."""
    with warnings.catch_warnings():
        # From 2.15 on torch warns that it checks sparse tensors; users need not know.
        warnings.filterwarnings("ignore", "Validating sparse tensor invariants")
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def as_text(value: Any) -> str:
    """The bytes of :func:`dump_plain` as text, for JSON."""
    return b64encode(dump_plain(value)).decode()


def from_text(text: str) -> Any:
    """The value that :func:`as_text` was given; runs no code."""
    return load_plain(b64decode(text))
