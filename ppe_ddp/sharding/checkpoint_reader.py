"""Reads checkpoints of safetensors and of torch, in one file or several, without running code that is in them.

Files are mapped into memory: a tensor is read from disk only when its values are used.
"""

from __future__ import annotations

import json
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch import distributed as dist

from ppe_ddp.errors import CheckpointError
from ppe_ddp.torch_internals import metadata_of, set_metadata

Device: TypeAlias = "int | str | torch.device"
DeviceMap: TypeAlias = "Device | Mapping[str, Device] | None"
_Readers: TypeAlias = "OrderedDict[str, Callable[[], Any]]"
"""Reads each entry of a file; has the versions of modules (``_metadata``) that the file has."""

_ARCHIVE = b"PK\x03\x04"
_PICKLE = b"\x80"
_SAFE = ".safetensors"
_INDEX = ".index.json"
_NAMES = ("model.safetensors", "pytorch_model.bin")


class Checkpoint(Mapping[str, Any]):
    """The entries of a checkpoint, each read on access.

    Tensors are views of the files, which must not change while a tensor is in use.

    Args:
        path: A ``.safetensors`` file; a file of ``torch.save``; an index (``.index.json``) of several; or a folder with
            one of these, as ``save_pretrained`` writes it.

    Raises:
        CheckpointError: A file, which the error names, cannot be read, is damaged, or holds more than tensors and plain
            values.
        ImportError: It is a safetensors file, and safetensors is not installed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._readers: _Readers = OrderedDict()
        for file, promised in _files_of(Path(path)).items():
            readers = _open(file)
            if twice := self._readers.keys() & readers.keys():
                raise CheckpointError(f"{file}: the entry {min(twice)!r} is in another file of the checkpoint, too")
            if lacking := [key for key in promised if key not in readers]:
                raise CheckpointError(f"{file}: it lacks {lacking[0]!r}, which the index says it has")
            self._readers.update(readers)
            _add_metadata(self, metadata_of(readers))

    def __getitem__(self, key: str) -> Any:
        return self._readers[key]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)


def load_state_dict(checkpoint_file: str | os.PathLike[str], device_map: DeviceMap = None) -> dict[str, Any]:
    """Read a checkpoint file on global rank 0; other ranks return an empty dict.

    A drop-in for ``accelerate.utils.modeling.load_state_dict``. Not collective: if rank 0 raises, the others do not.

    Args:
        checkpoint_file: A safetensors file or one of ``torch.save``.
        device_map: One device for all tensors, or devices by name of module: a tensor goes to the device of the
            innermost module named, ``""`` for the outermost. The default, also for ``"disk"``, is the CPU, where
            tensors are views of the file, which must not change while a tensor is in use.

    Returns:
        The entries by name: tensors, and a torch file's other values.

    Raises:
        CheckpointError: On rank 0: the file cannot be read, is damaged, or holds more than tensors and plain values.
        ValueError: On every rank: a device of the map does not exist.
    """
    places = _places(device_map)
    if dist.is_initialized() and dist.get_rank() != 0:
        return {}
    loaded: OrderedDict[str, Any] = OrderedDict()
    readers = _open(Path(checkpoint_file))
    for key, read in readers.items():
        value = read()
        loaded[key] = value.to(_place(key, places)) if isinstance(value, Tensor) else value
    _add_metadata(loaded, metadata_of(readers))
    return loaded


def _add_metadata(entries: Any, metadata: Any) -> None:
    """Add the versions of modules that a file has to those of ``entries``, by which modules load old entries."""
    if isinstance(metadata, Mapping):
        set_metadata(entries, {**(metadata_of(entries) or {}), **metadata})


def _open(file: Path) -> _Readers:
    try:
        if not file.is_file():
            raise FileNotFoundError("there is no such file")
        return _safe_file(file) if file.suffix == _SAFE else _torch_file(file)
    except ImportError:
        raise
    except UnpicklingError as error:
        name = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"it wants {name[1]}" if name else "it is no file of tensors and plain values"
        raise CheckpointError(f"{file}: refused, and nothing of it was executed: {what}") from None
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"{file}: cannot be read: {type(error).__name__}: {reason}") from error


def _safe_file(file: Path) -> _Readers:
    try:
        from safetensors import safe_open
    except ImportError:
        raise ImportError(f"{file}: reading it needs safetensors: pip install 'ppe_ddp[checkpoints]'") from None
    content: Any = safe_open(str(file), framework="pt")
    kind = (content.metadata() or {}).get("format", "pt")
    if kind != "pt":
        raise ValueError(f"it was saved from {kind!r}, and its tensors may be laid out otherwise than torch's")
    return OrderedDict((key, partial(content.get_tensor, key)) for key in content.keys())  # noqa: SIM118, no mapping


def _torch_file(file: Path) -> _Readers:
    # Only archives can be mapped into memory; torch has written them since 1.6.
    with file.open("rb") as start:
        head = start.read(len(_ARCHIVE))
    mapped = head == _ARCHIVE
    if not mapped and not head.startswith(_PICKLE):  # torch would take a text for instructions: "KeyError: 101"
        raise ValueError(f"it is no checkpoint: it begins with {head!r}, and nothing that torch.save writes does")
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except (LookupError, TypeError, AttributeError, EOFError) as error:
        kind = type(error).__name__
        raise ValueError(f"it is damaged, or no checkpoint: the unpickler has failed with {kind}: {error}") from error
    if not isinstance(content, Mapping):
        raise TypeError(f"it holds a {type(content).__name__}, not a state_dict")
    readers: _Readers = OrderedDict((key, partial(content.__getitem__, key)) for key in content)
    _add_metadata(readers, metadata_of(content))
    return readers


def _files_of(path: Path) -> dict[Path, list[str]]:
    """The files of a checkpoint, each with the keys that the index says it has."""
    if path.is_dir():
        path = _main_file(path)
    if path.suffix != ".json":
        return {path: []}
    try:
        index = json.loads(path.read_text())
        weight_map: dict[str, str] = index.get("weight_map", index)
        files: dict[Path, list[str]] = {}
        for key, name in weight_map.items():
            if Path(name).name != name:
                raise ValueError(f"it names {name!r}, which is not a file beside it")
            files.setdefault(path.parent / name, []).append(key)
    except Exception as error:
        raise CheckpointError(f"{path}: cannot be read as an index: {type(error).__name__}: {error}") from error
    return dict(sorted(files.items()))


def _main_file(folder: Path) -> Path:
    for name in _NAMES:
        for candidate in (folder / name, folder / f"{name}{_INDEX}"):
            if candidate.is_file():
                return candidate
    others = sorted(folder.glob(f"*{_INDEX}")) or sorted(folder.glob(f"*{_SAFE}"))
    if len(others) != 1:
        raise CheckpointError(
            f"{folder}: there is no {', '.join(_NAMES)} or index of one, and {len(others)} other files that might be "
            "meant; name one"
        )
    return others[0]


def _places(device_map: DeviceMap) -> dict[str, torch.device]:
    named = device_map if isinstance(device_map, Mapping) else {"": "cpu" if device_map is None else device_map}
    try:
        return {name: torch.device("cpu" if device == "disk" else device) for name, device in named.items()}
    except (RuntimeError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"device_map names a device that does not exist: {reason}") from error


def _place(name: str, places: Mapping[str, torch.device]) -> torch.device:
    while name and name not in places:
        name = name.rpartition(".")[0]
    return places.get(name, torch.device("cpu"))
