"""The files of a job's checkpoints: whole whenever the machine stops, and nothing in them is executed.

    000007-step-400/             complete: it got this name by a rename, after everything in it was on the disk
        __0_0.distcp ...         the files, which any tool for torch.distributed.checkpoint reads
        manifest.json            their sizes and checksums, and a checksum of itself
    .000008-step-500.1f3a.partial/   being written, or left by a job that was killed

The first number counts the checkpoints of the folder. It tells which is the newest: steps do not, after training went
back to an earlier one.

torch's own reader unpickles the file ``.metadata`` and every entry that is no tensor, which runs whatever such a file
names. Here only the classes that torch writes there are made, and entries read by ``torch.load(weights_only=True)``.

Imported when a Checkpointer is made, as torch.distributed.checkpoint takes a while to import.
"""

from __future__ import annotations

import difflib
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
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
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

from ppe_ddp.errors import CheckpointError
from ppe_ddp.sharding.checkpoint_reader import dump_plain, load_plain

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.storage import WriteResult
    from torch.futures import Future

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
"""The size of a file in bytes and its SHA-256 in hexadecimal, as JSON has them: a list of two."""


class CheckpointName(NamedTuple):
    """The name of a complete checkpoint, and what it says."""

    text: str
    number: int  # its place in the folder, from 1
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
        """The folders beside this one with checkpoints and a name like it."""
        above = self.path.absolute().parent
        names = os.listdir(above) if above.is_dir() else []
        like = difflib.get_close_matches(self.path.name, [name for name in names if name != self.path.name])
        return [above / name for name in like if CheckpointFolder(above / name).complete()]

    def begin(self, step: int) -> str:
        """Make an empty partial checkpoint, and remove those that were left behind. Returns its name."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.discard(*filter(_PARTIAL.fullmatch, os.listdir(self.path)))
        number = max((name.number for name in self.complete()), default=0) + 1
        partial = f".{number:06}-step-{step}.{secrets.token_hex(4)}.partial"
        (self.path / partial).mkdir()
        return partial

    def publish(self, partial: str, files: Mapping[str, Digest]) -> Path:
        """Make a partial checkpoint complete, whose files are on the disk; it stays partial where the disk fails."""
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
            os.rename(final, folder)  # nobody takes for saved what may not be there after a power cut
            raise
        return final

    def prune(self, keep: int, damaged: Collection[str]) -> None:
        """Remove all but the newest ``keep`` complete checkpoints; damaged ones first of all."""
        try:
            names = [name.text for name in self.complete()]
        except OSError as error:
            logger.warning("old checkpoints in %s cannot be removed: %s", self.path, error)
            return
        good = [name for name in names if name not in damaged]
        for name in [*(name for name in names if name in damaged), *good[:-keep]]:
            # Not complete from here on, so that nobody meets half a one.
            aside = f".{name}.{secrets.token_hex(4)}.partial"
            try:
                os.rename(self.path / name, self.path / aside)
            except OSError as error:
                logger.warning("the checkpoint %s cannot be removed: %s", self.path / name, error)
            else:
                self.discard(aside)

    def damage(self, name: str, part: int, parts: int) -> str:
        """The damage of a complete checkpoint, as text; empty where there is none."""
        manifest = self.path / name / MANIFEST
        try:
            try:
                files = _files_of(manifest.read_text())
            except (ValueError, TypeError, KeyError) as error:
                return f"{manifest} is damaged: {error}"
            for file, digest in sorted(files.items())[part::parts]:
                if list(_digest(self.path / name / file)) != list(digest):
                    return f"{self.path / name / file} is damaged: it is not what was written"
        except OSError as error:
            return str(error)
        return ""

    def discard(self, *names: str) -> None:
        """Remove checkpoints that are not complete, as far as that goes."""
        for name in names:
            shutil.rmtree(self.path / name, ignore_errors=True)


def sync(file: Path) -> Digest:
    """Wait until a file is on the disk; returns its size and checksum."""
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
    descriptor = os.open(path, os.O_RDONLY)  # of a folder too
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
    """Write what each rank has into files of its own, not yet synchronized; on all ranks, as are the errors of one."""
    planner = _PlainSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    # Files are synchronized where their checksums are made: torch does so before it has written what it still buffers.
    writer = _EntryWriter(folder, sync_files=False)
    _together(load_group, partial(save, entries, storage_writer=writer, planner=planner))


def read_entries(targets: dict[str, Any], folder: Path, load_group: LoadGroup) -> None:
    """Read into ``targets``, tensors into those that are there; on all ranks, as are the errors of one."""
    planner = _PlainLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    _together(load_group, partial(load, targets, storage_reader=_EntryReader(folder), planner=planner))


def metadata_of(folder: Path) -> Metadata:
    """Read the metadata of ``folder``; refuse what torch does not write there, and execute nothing."""
    content = (folder / METADATA).read_bytes()
    metadata: Metadata = _MetadataUnpickler(io.BytesIO(content)).load()
    for info in (metadata.storage_data or {}).values():
        if Path(info.relative_path).name != info.relative_path:
            raise ValueError(f"{folder / METADATA} names {info.relative_path!r}, which is not a file beside it")
    return metadata


class _MetadataUnpickler(pickle.Unpickler):
    """Makes the classes that torch writes into ``.metadata``, dtypes and sizes, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _OF_METADATA.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if module.split(".")[0] == "pathlib" and name.endswith("Path"):
            return PurePosixPath  # where it was saved, which nobody looks at
        raise pickle.UnpicklingError(f"{METADATA} wants {module}.{name}, which torch does not write there: refused")


class _PlainSavePlanner(DefaultSavePlanner):
    """Refuses what could not be loaded without executing it, and sparse tensors, which torch does not save."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """The bytes of an entry that is no tensor."""
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
            # Of no class of the user's, which would have to be executed to load it.
            return super().transform_object(write_item, object).as_subclass(torch.Tensor)
        try:
            return io.BytesIO(dump_plain(object))
        except TypeError as error:
            raise TypeError(f"{write_item.index.fqn!r} cannot be saved: {error}") from error


class _PlainLoadPlanner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load an entry that is no tensor."""
        self.state_dict[read_item.dest_index.fqn] = load_plain(value.getvalue())


class _EntryWriter(FileSystemWriter):
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write; what goes wrong can be told to the other ranks, which torch sends a pickle of the error."""
        return _tellable(lambda: super(_EntryWriter, self).write_data(plan, planner))


class _EntryReader(FileSystemReader):
    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Read by :func:`metadata_of`."""
        return _tellable(lambda: metadata_of(Path(self.path)))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read; errors as in :class:`_EntryWriter`."""
        return _tellable(lambda: super(_EntryReader, self).read_data(plan, planner))


def _tellable(call: Callable[[], _T]) -> _T:
    """Call, and raise nothing but CheckpointError: an error that cannot be pickled would leave the others waiting."""
    try:
        return call()
    except Exception as error:
        raise CheckpointError(f"{type(error).__name__}: {error}") from None


def _together(load_group: LoadGroup, call: Callable[..., object]) -> None:
    """Call torch for the ranks of ``load_group``, and raise errors of any rank as this library's."""
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
