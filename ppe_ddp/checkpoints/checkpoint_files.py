"""The files of a job's checkpoints, which are complete even if the machine stops, and are read without running code.

    000007-step-400/             complete: renamed to this when everything in it was on the disk
        __0_0.distcp ...         the files, which any tool for torch.distributed.checkpoint reads
        manifest.json            their sizes and checksums, and a checksum of itself
    .000008-step-500.1f3a.partial/   being written, or left by a job that was killed

The first number counts the checkpoints of the folder. The highest is the newest; the step is not, after a training that
was set back to an earlier one.

torch's own reader unpickles the file ``.metadata`` and all entries that are not tensors, and so runs any code that they
name. Here the unpickler makes only the classes that torch writes, and ``torch.load(weights_only=True)`` reads entries.

Imported only when a Checkpointer is made, as importing torch.distributed.checkpoint takes a while.
"""

from __future__ import annotations

import difflib
import enum
import hashlib
import io
import json
import logging
import os
import pickle
import re
import secrets
import shutil
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeVar

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ppe_ddp.backends.json_collectives import dump_plain, load_plain
from ppe_ddp.errors import CheckpointError
from ppe_ddp.sharding.load_group import LoadGroup

_T = TypeVar("_T")
logger = logging.getLogger("ppe_ddp")

MANIFEST = "manifest.json"
_COMPLETE = re.compile(r"(\d+)-step-(\d+)")
_PARTIAL = re.compile(r"\.\d+-step-\d+\.[0-9a-f]+\.partial")
_PIECE = 1 << 20

METADATA = ".metadata"
_OF_METADATA = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
}

Digest = Sequence[object]
"""The size of a file in bytes, and its SHA-256 in hexadecimal: a list of two, as JSON has no tuples."""


class CheckpointName(NamedTuple):
    """The name of a complete checkpoint, and its parts."""

    text: str
    number: int  # counts the checkpoints of the folder, from 1
    step: int


class CheckpointFolder:
    """The checkpoints in a folder, which belongs to one job at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def complete(self) -> list[CheckpointName]:
        """The complete checkpoints, the newest last."""
        found = []
        for name in os.listdir(self.path) if self.path.is_dir() else ():
            match = _COMPLETE.fullmatch(name)
            if match:
                found.append(CheckpointName(name, int(match[1]), int(match[2])))
        return sorted(found, key=lambda name: name.number)

    def nearby(self) -> list[Path]:
        """Folders beside this one that have checkpoints and a similar name."""
        above = self.path.absolute().parent
        names = os.listdir(above) if above.is_dir() else []
        like = difflib.get_close_matches(self.path.name, [name for name in names if name != self.path.name])
        return [above / name for name in like if CheckpointFolder(above / name).complete()]

    def next_number(self) -> int:
        """The number of the next checkpoint."""
        return max((name.number for name in self.complete()), default=0) + 1

    def begin(self, number: int, step: int) -> str:
        """Make an empty partial checkpoint, and remove older partial ones. Returns its name."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.discard(*filter(_PARTIAL.fullmatch, os.listdir(self.path)))
        partial = f".{number:06}-step-{step}.{secrets.token_hex(4)}.partial"
        (self.path / partial).mkdir()
        return partial

    def publish(self, partial: str, files: Mapping[str, Digest]) -> Path:
        """Make a partial checkpoint complete, after its files are on the disk; if the disk fails it stays partial."""
        folder = self.path / partial
        there = set(os.listdir(folder))
        if there != set(files):
            lacking, more = sorted(set(files) - there)[:3], sorted(there - set(files))[:3]
            raise ValueError(
                f"{folder} lacks {lacking} that ranks have written, and has {more} that none has: all ranks must have "
                "the folder in common"
            )
        content = json.dumps({"files": dict(files)}, sort_keys=True)
        manifest = {"content": content, "sha256": hashlib.sha256(content.encode()).hexdigest()}
        (folder / MANIFEST).write_text(json.dumps(manifest))
        sync(folder / MANIFEST)
        _sync_folder(folder)
        final = self.path / partial[1:].split(".", 1)[0]
        os.rename(folder, final)
        try:
            _sync_folder(self.path)
        except OSError:
            os.rename(final, folder)  # after a power cut it might not be there
            raise
        return final

    def prune(self, keep: int, damaged: Collection[str]) -> None:
        """Remove damaged checkpoints, and all but the newest ``keep`` others."""
        try:
            names = [name.text for name in self.complete()]
        except OSError as error:
            logger.warning("old checkpoints in %s cannot be removed: %s", self.path, error)
            return
        good = [name for name in names if name not in damaged]
        for name in [*(name for name in names if name in damaged), *good[:-keep]]:
            # First under the name of a partial one, as a kill meanwhile would leave half a checkpoint.
            aside = f".{name}.{secrets.token_hex(4)}.partial"
            try:
                os.rename(self.path / name, self.path / aside)
            except OSError as error:
                logger.warning("the checkpoint %s cannot be removed: %s", self.path / name, error)
            else:
                self.discard(aside)

    def damage(self, name: str, part: int, parts: int) -> tuple[str, bool]:
        """The first damage in the manifest or in this ``part`` of the files, as text; empty if there is none.

        It also tells whether the damage stays: an error of reading may pass, as where too many files are open.
        """
        manifest = self.path / name / MANIFEST
        try:
            try:
                files = _files_of(manifest.read_text())
            except (ValueError, TypeError, KeyError) as error:
                return f"{manifest} is damaged: {error}", True
            for file, digest in sorted(files.items())[part::parts]:
                if list(_digest(self.path / name / file)) != list(digest):
                    return f"{self.path / name / file} is damaged: it is not what was written", True
        except OSError as error:
            return f"{self.path / name} cannot be read: {error}", isinstance(error, FileNotFoundError)
        return "", False

    def discard(self, *names: str) -> None:
        """Remove partial checkpoints, as far as possible."""
        for name in names:
            shutil.rmtree(self.path / name, ignore_errors=True)


def sync(file: Path) -> Digest:
    """Wait until a file is on the disk. Returns its size and checksum."""
    digest = _digest(file)
    _fsync(file)
    return digest


def _files_of(manifest: str) -> dict[str, Digest]:
    parts = json.loads(manifest)
    if hashlib.sha256(parts["content"].encode()).hexdigest() != parts["sha256"]:
        raise ValueError("its checksum is wrong")
    files: dict[str, Digest] = json.loads(parts["content"])["files"]
    return files


def _sync_folder(folder: Path) -> None:
    _fsync(folder)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)  # a file or a folder
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(file: Path) -> Digest:
    digest, nbytes = hashlib.sha256(), 0
    with file.open("rb") as stream:
        while piece := stream.read(_PIECE):
            digest.update(piece)
            nbytes += len(piece)
    return [nbytes, digest.hexdigest()]


# ---------------------------------------------------------------------- entries


def write_entries(entries: dict[str, Any], folder: Path, load_group: LoadGroup) -> None:
    """Write each rank's entries into files of its own; all ranks call it together, and raise the error of any."""
    planner = _PlainSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    # sync() does that: torch would do so while a part of the file is still in Python's buffer.
    writer = _EntryWriter(folder, sync_files=False)
    _together(load_group, partial(save, entries, storage_writer=writer, planner=planner))


def read_entries(targets: dict[str, Any], folder: Path, load_group: LoadGroup) -> None:
    """Fill ``targets``, whose tensors are written in place; all ranks call it together, and raise the error of any."""
    planner = _PlainLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    _together(load_group, partial(load, targets, storage_reader=_EntryReader(folder), planner=planner))


def metadata_of(folder: Path) -> Metadata:
    """Read the metadata of ``folder`` without running code; refuse classes that torch does not write there."""
    content = (folder / METADATA).read_bytes()
    metadata: Metadata = _MetadataUnpickler(io.BytesIO(content)).load()
    for info in (metadata.storage_data or {}).values():
        if Path(info.relative_path).name != info.relative_path:
            raise ValueError(f"{folder / METADATA} names {info.relative_path!r}, which is not a file beside it")
    return metadata


class _MetadataUnpickler(pickle.Unpickler):
    """Makes dtypes, sizes and the classes that torch writes into ``.metadata``, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _OF_METADATA.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if module.split(".")[0] == "pathlib" and name.endswith("Path"):
            return PurePosixPath  # the folder in which it was saved; not used
        if (module, name) == ("builtins", "getattr"):
            return _member_of  # as which Python 3.11.0 to 3.11.3 writes a member of an enumeration
        raise _refused(f"{module}.{name}")


def _member_of(kind: object, name: str) -> object:
    if not isinstance(kind, enum.EnumMeta):
        raise _refused(f"{name!r} of {kind!r}")
    return kind[name]


def _refused(what: str) -> pickle.UnpicklingError:
    return pickle.UnpicklingError(f"{METADATA} wants {what}, which torch does not write there: refused")


class _PlainSavePlanner(DefaultSavePlanner):
    """Refuses values that only running code could load, and sparse tensors, which torch does not save."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """The tensor to write, or the bytes of any other entry."""
        if write_item.type != WriteItemType.BYTE_IO:
            if object.layout is not torch.strided:
                raise TypeError(
                    f"{write_item.index.fqn!r} cannot be saved: it is a sparse tensor; as momentum of sparse gradients "
                    "take torch.optim.SparseAdam, or nn.Embedding without sparse=True"
                )
            if hasattr(object, "__tensor_flatten__"):
                raise TypeError(
                    f"{write_item.index.fqn!r} cannot be saved: it is a {type(object).__name__}, which keeps "
                    "its values in other tensors: save those, or what it was made of"
                )
            # Loading a class of the user's would run code.
            return super().transform_object(write_item, object).as_subclass(torch.Tensor)
        try:
            return io.BytesIO(dump_plain(object))
        except TypeError as error:
            raise TypeError(f"{write_item.index.fqn!r} cannot be saved: {error}") from error


class _PlainLoadPlanner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = load_plain(value.getvalue())


class _EntryWriter(FileSystemWriter):
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        return _tellable(lambda: super(_EntryWriter, self).write_data(plan, planner))


class _EntryReader(FileSystemReader):
    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return _tellable(lambda: metadata_of(Path(self.path)))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        return _tellable(lambda: super(_EntryReader, self).read_data(plan, planner))


def _tellable(call: Callable[[], _T]) -> _T:
    """Turn all errors into CheckpointError: torch pickles them for the other ranks, and not every error can be."""
    try:
        return call()
    except Exception as error:
        raise CheckpointError(f"{type(error).__name__}: {error}") from None


def _together(load_group: LoadGroup, call: Callable[..., object]) -> None:
    """Call torch's ``save`` or ``load`` for the ranks of ``load_group``; a failure of any rank is a CheckpointError."""
    group = load_group.group
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is ")  # disabled: there is one process
            load_group.communicate(lambda: call(process_group=group, no_dist=group is None))
    except CheckpointException as error:
        texts = [f"rank {rank}: {_text(failure)}" for rank, (failure, _) in error.failures.items()]
        raise CheckpointError("; ".join(texts)) from None


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
